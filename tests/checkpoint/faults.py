"""Strike at the n-th call to the file system: with an error, or by killing the process."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sheer.checkpoint import list_tags, load_full, save
from tests.checkpoint.ranks import Solo, whole

CALLS = [
    (os, name) for name in ("mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "ftruncate")
]
CALLS += [(io, "open")]  # what Path.open calls
SCENARIOS = ("new tag", "same tag", "keep last", "first save")


class Tripwire:
    """Counts calls; `strike(name, call)` is run in the place of call number `at`."""

    def __init__(self, at: int, strike: Callable[[str, Callable[[], Any]], Any]) -> None:
        self.calls: list[str] = []
        self._at, self._strike, self._lock = at, strike, threading.Lock()

    @property
    def struck(self) -> bool:
        return len(self.calls) > self._at

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls.append(name)
                mine = len(self.calls) - 1 == self._at
            if not mine:
                return real(*args, **kwargs)
            return self._strike(name, lambda: real(args[0], args[1][: len(args[1]) // 2]))

        return wrapped


@contextmanager
def tripwire(at: int, strike: Callable[[str, Callable[[], Any]], Any]) -> Iterator[Tripwire]:
    """While it lasts, the `at`-th call to the file system is `strike` instead."""
    wire = Tripwire(at, strike)
    with ExitStack() as stack:
        for module, name in CALLS:
            stack.enter_context(mock.patch.object(module, name, wire.wrap(name, getattr(module, name))))
        yield wire


def value(seed: int) -> torch.Tensor:
    return torch.arange(1000.0) + seed


def save_value(root: Path, tag: str, seed: int, *, keep_last: int | None = None) -> None:
    shards = [whole("param", "w", value(seed)), whole("optim.step", "w", torch.tensor(seed))]
    save(root, tag, shards=shards, facts={}, state={"seed": seed}, rng={}, axis=Solo(), keep_last=keep_last)


def before(root: Path, scenario: str) -> None:
    """What is there when the fatal save begins."""
    shutil.rmtree(root, ignore_errors=True)
    if scenario != "first save":
        save_value(root, "step1", 1)
    if scenario == "keep last":
        save_value(root, "step2", 1)


def fatal(root: Path, scenario: str) -> None:
    """The save that is struck."""
    tag = "step1" if scenario == "same tag" else "step9"
    save_value(root, tag, 2, keep_last=1 if scenario == "keep last" else None)


def loads(root: Path) -> str:
    """What the latest checkpoint is: `old`, `new`, or what is wrong with it."""
    full = load_full(root)["w"]
    return "old" if torch.equal(full, value(1)) else "new" if torch.equal(full, value(2)) else "wrong"


def die(name: str, half: Callable[[], Any]) -> None:
    """Be killed at this call; a write is killed half-way."""
    if name == "write":
        half()
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(root: Path, scenario: str, at: int) -> bool:
    """Run the fatal save in a child that is killed at call `at`; False where it came to its end before."""
    child = os.fork()
    if child == 0:
        with tripwire(at, die):
            fatal(root, scenario)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def killed_everywhere(root: Path, scenario: str) -> list[dict[str, Any]]:
    """Kill a save at every call in turn. For each: what the latest checkpoint is, and what the next save leaves.

    In a process of its own: it forks, which one that runs tests had better not.
    """
    os.fsync = lambda fd: None  # a kill loses nothing that was written; it takes most of the time
    outcomes = []
    for at in range(10_000):
        before(root, scenario)
        if not killed_at(root, scenario, at):
            break
        found = "nothing" if scenario == "first save" and not (root / "latest").exists() else loads(root)
        save_value(root, "after", 2)
        left = sorted(name for name in os.listdir(root) if name.startswith(".") and name != ".lock")
        outcomes.append({"found": found, "after": loads(root), "left": left, "tags": list_tags(root)})
    return outcomes
