"""Processes of a test's own, to be killed or ended in other ways: forked from one that has imported torch already."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

PATIENCE_S = 110.0
IMPORTED = ("torch._dynamo", "sheer", "tests.engine.oracle", "tests.engine.models", "tests.checkpoint.faults")


def context() -> ForkServerContext:
    """What makes them, and queues between them."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(IMPORTED))
    return made


def started(target: Callable[..., object], *args: Any) -> ForkServerProcess:
    """`target(*args)` in a new process, begun."""
    process = context().Process(target=target, args=args)
    process.start()
    return process


def result_of(target: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """The exit code of a new process, and what `target(*args)` returned there; None where it did not come to that."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = started(_tell, theirs, target, args)
    theirs.close()
    try:
        assert mine.poll(PATIENCE_S), f"no end after {PATIENCE_S} s"
        try:
            told = mine.recv()
        except EOFError:
            told = None
        process.join(PATIENCE_S)
        assert process.exitcode is not None, f"no end {PATIENCE_S} s after its result"
        return process.exitcode, told
    finally:
        process.kill()


def _tell(link: Any, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    link.send(target(*args))
