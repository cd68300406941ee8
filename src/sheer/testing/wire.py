"""What pytest's process and its workers say to each other. Plain data, pickled over a pipe.

pytest  -> worker    Setup, then for each test Job and CleanUp, at the end Stop
worker  -> pytest    Ready after Setup and after each CleanUp, Finished after each Job
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple, TypedDict

WORKER_OPTION = "sheer_worker"
"""The key in pytest's options by which the plugin knows that it runs inside a worker."""


class Setup(TypedDict):
    """Everything a worker needs to become a pytest like the one that started it.

    A dict, because a worker that unpickles it must not import this package yet (`boot.py` says why).
    """

    rank: int
    options: dict[str, Any]
    """`config.option` of the starting pytest, less what is only its own business."""
    args: list[str]
    sys_path: list[str]
    store_port: int
    """The TCPStore that pytest's process serves on the loopback interface."""
    stacks_path: str
    """Where this worker's faulthandler writes."""


class Job(NamedTuple):
    """One test on one rank."""

    serial: int
    """Counts the jobs of a pool: the prefix of this test's keys in the store."""
    nodeid: str
    path: str
    size: int
    timeout: float
    tmp_path: str


class CleanUp(NamedTuple):
    """Every rank has ended: leave the process group. Passed ranks wait for this, so that none hangs up on a peer."""


class Stop(NamedTuple):
    """The session is over."""


class Ready(NamedTuple):
    """The worker is clean and waits for a job."""


class Warned(NamedTuple):
    """A warning recorded in a worker, to be shown in pytest's summary."""

    text: str
    category: type[Warning]
    filename: str
    lineno: int


class Finished(NamedTuple):
    """A rank ran its test to the end."""

    reports: list[dict[str, Any]]
    """Its setup, call and teardown reports, serialised by pytest's own hook."""
    trouble: str | None
    """Why there are no reports: the test could not be collected here, or the body asked pytest to exit."""
    passed: bool
    warned: list[Warned]


class End(Enum):
    """How a rank's test came to its end."""

    FINISHED = "it ran to the end and reported"
    DIED = "its process ended"
    HUNG = "it was cut off at the test's timeout"
    STRANDED = "it was cut off shortly after another rank had ended without passing"
    STUCK = "it passed, but did not come back from leaving its process group"


class Outcome(NamedTuple):
    """One rank's part of a test as pytest's process saw it."""

    rank: int
    end: End
    finished: Finished | None
    account: str
    """For the ends other than FINISHED: what happened, with stacks."""
    stdout: str
    stderr: str
