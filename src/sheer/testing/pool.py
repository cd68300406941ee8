"""Worker processes, kept warm from test to test, and the clock that watches them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from sheer.testing.stacks import readable
from sheer.testing.wire import CleanUp, End, Finished, Job, Outcome, Ready, Setup, Stop

GRACE_S = 5.0
"""How long the other ranks may go on after the first that did not pass, and how long any rank may take to clean up."""
STARTUP_S = 120.0
CLOSE_S = 3.0
_BOOT = Path(__file__).with_name("boot.py")
POLL_S = 0.2
"""How often a worker is looked at that neither speaks nor closes its pipe (a child of it may hold the pipe open)."""


class WorkerStartError(Exception):
    """A worker did not come up; the message has its output."""


class Template(NamedTuple):
    """What all workers of a pool have in common."""

    options: dict[str, Any]
    args: list[str]
    folder: Path
    live_output: bool
    """True under `pytest -s`: workers write to the terminal, and nothing is kept for the reports."""


class Worker:
    """One process of the pool, seen from pytest's."""

    def __init__(self, rank: int, *, template: Template, store_port: int, serial: int) -> None:
        self.rank = rank
        folder = template.folder / f"rank{rank}-{serial}"
        folder.mkdir(parents=True)
        self._files = {name: folder / name for name in ("stdout", "stderr", "stacks")}
        for file in self._files.values():
            file.touch()
        self._marks = dict.fromkeys(self._files, 0)
        self.link, theirs = multiprocessing.Pipe()
        self._process = self._spawn(theirs, live_output=template.live_output)
        theirs.close()
        options = template.options | {"basetemp": str(folder / "tmp")}
        setup = Setup(
            rank=rank,
            options=options,
            args=template.args,
            sys_path=sys.path,
            store_port=store_port,
            stacks_path=str(self._files["stacks"]),
        )
        self.send(setup)

    def _spawn(self, link: Connection, *, live_output: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-u", str(_BOOT), str(link.fileno())]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with contextlib.ExitStack() as files:
            out, err = (
                None if live_output else files.enter_context(self._files[n].open("ab")) for n in ("stdout", "stderr")
            )
            # A session of its own: Ctrl-C reaches pytest only, which then ends the workers and what they started.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environ,
                pass_fds=[link.fileno()],
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def send(self, message: Setup | Job | CleanUp | Stop) -> None:
        """Say something; a worker that is dead is noticed when it is listened to."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.link.send(message)

    def receive(self) -> Ready | Finished:
        """What the worker says. EOFError when it has ended instead."""
        if not self.link.poll():
            raise EOFError
        try:
            message: Ready | Finished = self.link.recv()
        except ConnectionResetError:
            raise EOFError from None
        return message

    def begin(self, job: Job) -> None:
        """Hand over a job; output counts from here."""
        self._marks = {name: file.stat().st_size for name, file in self._files.items()}
        self.send(job)

    def written(self, name: str) -> str:
        """What was written to `stdout`, `stderr` or `stacks` since the job began."""
        with self._files[name].open("rb") as file:
            file.seek(self._marks[name])
            return file.read().decode(errors="replace")

    def ask_for_stacks(self) -> None:
        """Have faulthandler write the stacks of all threads; works in a worker blocked anywhere."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR2)

    def epitaph(self) -> str:
        """How the process ended, for people. It must have ended, or be about to."""
        try:
            code = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "its process closed the pipe to pytest but went on"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"its process {how}" + (f"\n{readable(self.written('stacks'))}" if self.written("stacks") else "")

    def kill(self) -> None:
        """End the process and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.link.close()

    def outcome(self, end: End, *, finished: Finished | None = None, account: str = "") -> Outcome:
        """This rank's part of the job, with its output so far."""
        return Outcome(self.rank, end, finished, account, self.written("stdout"), self.written("stderr"))


class Pool:
    """Workers 0..n-1. A test of size k runs on the first k of them; missing and dead ones are started on demand."""

    def __init__(self, template: Template) -> None:
        from torch._C._distributed_c10d import TCPStore  # public in torch.distributed, but not to mypy

        self._template = template
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: the system picks one
        self._workers: dict[int, Worker] = {}
        self._serial = 0

    def run(self, nodeid: str, *, path: Path, size: int, timeout: float, tmp_path: Path) -> list[Outcome]:
        """Run one test on `size` ranks. The outcomes come in the order in which the ranks ended."""
        crew = self._crew(size)
        self._serial += 1
        job = Job(self._serial, nodeid, str(path), size, timeout, str(tmp_path))
        try:
            for worker in crew:
                worker.begin(job)
            outcomes = self._watch(crew, timeout)
            stuck = self._clean_up([crew[outcome.rank] for outcome in outcomes if outcome.end is End.FINISHED])
        except BaseException:  # Ctrl-C, or a timeout from elsewhere: nobody listens to these workers any more
            self._discard(crew)
            raise
        if all(outcome.finished is not None and outcome.finished.passed for outcome in outcomes):
            outcomes = [stuck.get(outcome.rank, outcome) for outcome in outcomes]
        return outcomes

    def close(self) -> None:
        """End all workers: politely, then not."""
        for worker in self._workers.values():
            worker.send(Stop())
        deadline = time.monotonic() + CLOSE_S
        while any(worker.alive for worker in self._workers.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._discard(list(self._workers.values()))

    # -- who runs --------------------------------------------------------------------------------------------------

    def _crew(self, size: int) -> list[Worker]:
        """The first `size` workers, all ready. New ones start side by side."""
        self._discard([worker for worker in self._workers.values() if not worker.alive])
        new = [self._start(rank) for rank in range(size) if rank not in self._workers]
        deadline = time.monotonic() + STARTUP_S
        try:
            while new:
                for worker in speaking(new, until=deadline):
                    worker.receive()
                    new.remove(worker)
                if new and time.monotonic() > deadline:
                    raise EOFError
        except EOFError:
            account = "\n".join(self._account_of_start(worker) for worker in new)
            self._discard(new)
            raise WorkerStartError(f"A worker for a test with world_size({size}) did not start.\n{account}") from None
        except BaseException:
            self._discard(new)
            raise
        return [self._workers[rank] for rank in range(size)]

    def _start(self, rank: int) -> Worker:
        self._serial += 1
        worker = Worker(rank, template=self._template, store_port=self._store.port, serial=self._serial)
        self._workers[rank] = worker
        return worker

    def _account_of_start(self, worker: Worker) -> str:
        state = f"not ready within {STARTUP_S:g} s" if worker.alive else worker.epitaph()
        return f"-- rank {worker.rank}: {state}; its output --\n{worker.written('stdout')}{worker.written('stderr')}"

    def _discard(self, workers: Iterable[Worker]) -> None:
        for worker in list(workers):
            worker.kill()
            del self._workers[worker.rank]

    # -- the clock -------------------------------------------------------------------------------------------------

    def _watch(self, crew: list[Worker], timeout: float) -> list[Outcome]:
        """Listen until every rank has ended or time is up; the first rank that does not pass shortens the time."""
        outcomes: list[Outcome] = []
        pending = list(crew)
        deadline, late = time.monotonic() + timeout, End.HUNG
        while pending and time.monotonic() < deadline:
            for worker in speaking(pending, until=deadline):
                pending.remove(worker)
                outcomes.append(self._ended(worker))
                finished = outcomes[-1].finished
                if (finished is None or not finished.passed) and time.monotonic() + GRACE_S < deadline:
                    deadline, late = time.monotonic() + GRACE_S, End.STRANDED
        return outcomes + self._cut_off(pending, late)

    def _ended(self, worker: Worker) -> Outcome:
        try:
            message = worker.receive()
        except EOFError:
            outcome = worker.outcome(End.DIED, account=worker.epitaph())
            self._discard([worker])
            return outcome
        assert isinstance(message, Finished), message
        return worker.outcome(End.FINISHED, finished=message)

    def _cut_off(self, workers: list[Worker], end: End) -> list[Outcome]:
        """Take the stacks of all of them first: the first kill changes what the others are doing."""
        for worker in workers:
            worker.ask_for_stacks()
        dumps = _settled(workers)
        outcomes = [worker.outcome(end, account=readable(dumps[worker.rank])) for worker in workers]
        self._discard(workers)
        return outcomes

    def _clean_up(self, workers: list[Worker]) -> dict[int, Outcome]:
        """Let the ranks leave their process group. Those that cannot are replaced, and their stacks returned."""
        for worker in workers:
            worker.send(CleanUp())
        waiting, deadline = list(workers), time.monotonic() + GRACE_S
        while waiting and time.monotonic() < deadline:
            for worker in speaking(waiting, until=deadline):
                waiting.remove(worker)
                try:
                    worker.receive()
                except EOFError:
                    self._discard([worker])
        return {outcome.rank: outcome for outcome in self._cut_off(waiting, End.STUCK)}


def speaking(workers: list[Worker], *, until: float) -> list[Worker]:
    """Wait, at most until then, for workers that have something to say or are dead."""
    links = {worker.link: worker for worker in workers}
    while True:
        remaining = until - time.monotonic()
        ready = wait(list(links), timeout=max(0.0, min(remaining, POLL_S)))
        found = [links[link] for link in ready if isinstance(link, Connection)]
        found += [worker for worker in workers if worker not in found and not worker.alive]
        if found or remaining <= 0:
            return found


def _settled(workers: list[Worker]) -> dict[int, str]:
    """The stack dumps of workers that were asked for them, once they have stopped growing."""
    dumps: dict[int, str] = {}
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        before, dumps = dumps, {worker.rank: worker.written("stacks") for worker in workers}
        if before == dumps and all(dumps.values()):
            break
        time.sleep(0.1)
    return dumps
