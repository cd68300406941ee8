"""Starts the demo's workers, watches them, and sees to it that none is left behind.

A worker ends in one of four ways: it finishes; the launcher asks it to stop at a step boundary; the launcher ends its
process group; or the launcher dies and the worker's standard input with it (`link.Orders`).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from sheer.cli.demo.folder import Folder
from sheer.cli.demo.link import STOP, Listener

STOP_PATIENCE = 20.0
"""Seconds the workers get to reach a step boundary and save, once a stop is asked for."""
FAILURE_PATIENCE = 3.0
"""Seconds the others get to say what is wrong, once one worker has failed."""


class Outcome(Enum):
    """How training ended."""

    FINISHED = "every worker came to its end"
    STOPPED = "the user asked to stop, and the workers saved at a step boundary"
    CUT_SHORT = "the user asked to stop, and no step boundary was near"
    FAILED = "a worker failed"


class Ending(NamedTuple):
    """How training ended, and what there is to say about it."""

    outcome: Outcome
    signal: int | None
    """The signal that asked to stop."""
    complaint: str
    """What failed; empty unless FAILED."""


@dataclass
class Wish:
    """The user's wish to stop, written by the signal handler and read by the watching loop."""

    signal: int | None = None
    times: int = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.signal = number
        self.times += 1


@contextmanager
def heard_signals() -> Iterator[Wish]:
    """Turn Ctrl-C, SIGTERM and a closing terminal into a wish, as long as the context lasts."""
    wish = Wish()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    earlier = {number: signal.signal(number, wish.handle) for number in numbers}
    try:
        yield wish
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


class Workers:
    """The running processes, one per rank. A context manager: leaving it ends those that still run."""

    def __init__(self, folder: Folder, *, count: int, save_every: int, lock: int) -> None:
        receive, send = os.pipe()
        port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(count):
                command = [sys.executable, "-m", "sheer.cli.demo.worker", str(folder.root), str(save_every), str(send)]
                with folder.log(rank).open("wb") as log:
                    self.processes.append(
                        subprocess.Popen(
                            command,
                            env=environment(rank=rank, count=count, port=port),
                            stdin=subprocess.PIPE,
                            stdout=log,
                            stderr=log,
                            pass_fds=(send, lock),
                            start_new_session=True,
                        )
                    )
        except BaseException:
            self.end()
            os.close(receive)
            raise
        finally:
            os.close(send)
        self._receive = receive
        self.listener = Listener(receive)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        os.close(self._receive)

    def ask_to_stop(self) -> None:
        """Ask every worker to save at its next step boundary and leave."""
        for process in self.processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already
                process.stdin.write(STOP)
                process.stdin.flush()

    def failures(self, *, by_signal: bool = False) -> list[str]:
        """What became of each worker that ended badly, rank by rank; `by_signal`: only of those a signal ended."""
        codes = [process.poll() for process in self.processes]
        return [
            f"rank {rank} {describe(code)}" for rank, code in enumerate(codes) if code and (code < 0 or not by_signal)
        ]

    @property
    def gone(self) -> bool:
        """True when no worker runs any more."""
        return all(process.poll() is not None for process in self.processes)

    def end(self) -> None:
        """End every worker and what it started, and collect them."""
        for process in self.processes:
            # Of a worker that has ended, compilers it started may be left in its group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def environment(*, rank: int, count: int, port: int) -> dict[str, str]:
    """The worker's environment: what torchrun would set, and one thread."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
    }


def free_port() -> int:
    """A TCP port nobody listens on, of those that the system gives nobody who asks for any: so it stays free."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(given.read_text().split()[0]) if given.exists() else 32768
    for port in random.SystemRandom().sample(range(min(10000, end // 2), end), 50):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no TCP port is free on 127.0.0.1; 50 were tried")


def describe(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"


def watch(workers: Workers, wish: Wish, *, show: Callable[[dict[str, Any]], None]) -> Ending:
    """Pass the workers' events to `show` until training ends, one way or another."""
    errors: list[str] = []
    deadline: float | None = None
    stepping = False
    while not (workers.listener.ended and workers.gone):
        for event in workers.listener.events(patience=0.2):
            stepping |= event["event"] == "step"
            if event["event"] == "error":
                errors.append(event["message"])
            else:
                show(event)
        if workers.failures():
            return Ending(Outcome.FAILED, None, complaint(workers, errors, show=show))
        if wish.times and not stepping:  # still starting or compiling: nothing new to save
            return Ending(Outcome.CUT_SHORT, wish.signal, "")
        if wish.times and deadline is None:
            workers.ask_to_stop()
            deadline = time.monotonic() + STOP_PATIENCE
            show({"event": "stopping"})
        if deadline is not None and (wish.times > 1 or time.monotonic() > deadline):
            return Ending(Outcome.CUT_SHORT, wish.signal, "")
        if workers.listener.ended:
            time.sleep(0.02)  # the pipe closes a moment before the process is gone
    if workers.failures():
        return Ending(Outcome.FAILED, None, complaint(workers, errors, show=show))
    return Ending(Outcome.STOPPED if wish.times else Outcome.FINISHED, wish.signal, "")


def complaint(workers: Workers, errors: Sequence[str], *, show: Callable[[dict[str, Any]], None]) -> str:
    """What to say about failed workers: which a signal ended, since that is the cause; then the errors they told."""
    told = list(errors)
    deadline = time.monotonic() + FAILURE_PATIENCE
    while not (workers.listener.ended and workers.gone) and time.monotonic() < deadline:
        for event in workers.listener.events(patience=0.1):
            if event["event"] == "error":
                told.append(event["message"])
            else:
                show(event)
    said = [*workers.failures(by_signal=True), *dict.fromkeys(told)]
    return "\n".join(said or workers.failures())
