"""The process of one rank: a pytest session that takes its tests from a pipe.

Each rank runs the test item through pytest's own protocol, so marks, fixtures, assertion rewriting, warning filters and
tracebacks are what they are in any pytest. The process begins in `boot.py`.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import queue
import signal
import socket
import threading
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # public in torch.distributed, but not to mypy

from sheer.testing.isolation import collect_garbage, undisturbed
from sheer.testing.wire import CleanUp, Finished, Job, Ready, Setup, Stop, Warned

STACKS_SIGNAL = signal.SIGUSR2


class Link:
    """The pipe to pytest's process. A thread reads it, so that this process also ends when that one is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="sheer-link", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                self._inbox.put(self._connection.recv())
            except (EOFError, OSError):
                # pytest was killed. The pool gave this process a group of its own: take the children along.
                os.killpg(os.getpgrp(), signal.SIGKILL)

    def receive(self) -> Any:
        """The next message, however long it takes."""
        return self._inbox.get()

    def send(self, message: Ready | Finished) -> None:
        """Say something to pytest's process."""
        self._connection.send(message)


class RankSession:
    """The plugin that turns a pytest session into one rank."""

    def __init__(self, setup: Setup, *, link: Link) -> None:
        self._link = link
        self._rank, self._port = setup["rank"], setup["store_port"]
        self._stacks = open(setup["stacks_path"], "a")  # noqa: SIM115  (faulthandler needs it for life)
        self._items: dict[str, dict[str, pytest.Item]] = {}  # by file, then by node id
        self._collect_errors: list[str] = []
        self._reports: list[pytest.TestReport] = []
        self._warned: list[Warned] = []
        self._tmp_path = Path()
        self._store = TCPStore("127.0.0.1", self._port, is_master=False, timeout=datetime.timedelta(seconds=30))

    # -- the hooks -----------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        """Collect nothing now; each job names its test."""
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve jobs until told to stop."""
        collect_garbage()
        self._link.send(Ready())
        while not isinstance(message := self._link.receive(), Stop):
            self._serve(message, session)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the reports of the running test."""
        self._reports.append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why a file could not be collected."""
        if report.failed:
            self._collect_errors.append(report.longreprtext)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        """Keep warnings that were no errors."""
        w = warning_message
        self._warned.append(Warned(str(w.message), w.category, w.filename, w.lineno))

    @pytest.fixture
    def tmp_path(self) -> Path:
        """One directory, empty at the start, shared by all ranks of the test."""
        return self._tmp_path

    # -- one job -------------------------------------------------------------------------------------------------

    def _serve(self, job: Job, session: pytest.Session) -> None:
        self._arm_stacks()
        with undisturbed():
            finished = self._run(job, session)
            self._link.send(finished)
            # A rank that passed stays in the group until all have ended. One that did not leaves at once, so that
            # peers waiting for it in a collective see the connection close.
            if finished.passed:
                self._expect_clean_up()
            if dist.is_initialized():
                dist.destroy_process_group()
        if not finished.passed:
            self._expect_clean_up()
        self._link.send(Ready())

    def _arm_stacks(self) -> None:
        """Have crashes and the pool's signal write the stacks; for each job, since a test may take the signal."""
        faulthandler.enable(self._stacks)
        faulthandler.unregister(STACKS_SIGNAL)
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)

    def _expect_clean_up(self) -> None:
        message = self._link.receive()
        assert isinstance(message, CleanUp), message

    def _run(self, job: Job, session: pytest.Session) -> Finished:
        self._reports, self._warned, self._tmp_path = [], [], Path(job.tmp_path)
        trouble = None
        try:
            item = self._find(job, session)
            self._join(job)
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        except UnrunnableError as problem:
            trouble = str(problem)
        except (
            BaseException
        ):  # pytest.exit and KeyboardInterrupt pass through pytest's protocol, which then stops short
            trouble = traceback.format_exc()
            session._setupstate.teardown_exact(None)
        serialise = session.config.hook.pytest_report_to_serializable
        reports = [serialise(config=session.config, report=report) for report in self._reports]
        passed = trouble is None and all(report.passed for report in self._reports)
        return Finished(reports, trouble, passed, self._warned)

    def _find(self, job: Job, session: pytest.Session) -> pytest.Item:
        if job.path not in self._items:
            self._collect_errors = []
            items = session.perform_collect([job.path])
            if self._collect_errors:
                raise UnrunnableError("\n".join(self._collect_errors))
            self._items[job.path] = {item.nodeid: item for item in items}
        found = self._items[job.path].get(job.nodeid)
        if found is None:
            raise UnrunnableError(
                f"{job.nodeid} is not among the {len(self._items[job.path])} tests that rank {self._rank} collected "
                f"from {job.path}. A test that runs on several processes must have the same id in each of them: do not "
                "make parametrize values or ids from random numbers, object addresses, times or sets."
            )
        return found

    def _join(self, job: Job) -> None:
        """Bring up the default process group of this test, and the environment that torchrun would have set."""
        here = {"RANK": self._rank, "LOCAL_RANK": self._rank}
        there = {"WORLD_SIZE": job.size, "LOCAL_WORLD_SIZE": job.size}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port}
        # As under torchrun the store is served by another process; the restart count keeps the keys of tests apart.
        agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": job.serial}
        os.environ.update({key: str(value) for key, value in (here | there | meeting | agent).items()})
        store = PrefixStore(f"test{job.serial}", self._store)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self._rank,
            world_size=job.size,
            timeout=datetime.timedelta(seconds=job.timeout + 60),  # the pool's clock rings first, with stacks
        )
        # Nobody begins before all have joined: a rank that dies at once must not take a joining peer with it. By the
        # store, which is served by pytest's process, so that it outlives every rank.
        store.set(f"joined{self._rank}", "")
        store.wait([f"joined{rank}" for rank in range(job.size)])


class UnrunnableError(Exception):
    """This rank has no such test."""


def _speak_over_loopback() -> None:
    """Let gloo use the loopback interface rather than look this machine's name up, which is slow or fails offline."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def serve(config: pytest.Config, connection: Connection, setup: Setup) -> NoReturn:
    """Run this process as one rank until pytest's process says stop, or is gone."""
    torch.set_num_threads(1)
    _speak_over_loopback()
    # The sign by which plugins know that this is not the session that writes caches and result files.
    config.workerinput = {"workerid": f"rank{setup['rank']}"}  # type: ignore[attr-defined]
    config.pluginmanager.register(RankSession(setup, link=Link(connection)), "sheer-rank")
    status = config.hook.pytest_cmdline_main(config=config)
    # Not through the interpreter's shutdown: a thread that a test left behind must not hold up the session's end.
    os._exit(int(status))
