"""Processes of a test's own, to be killed or ended in other ways: forked from one that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, NamedTuple

import torch

from sheer.cli.demo.launch import free_port

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


class Ranks(NamedTuple):
    """Processes that may make one process group, and what each tells."""

    processes: list[ForkServerProcess]
    results: list[Any]


@contextmanager
def ranks(target: Callable[..., object], world: int, *args: Any) -> Iterator[Ranks]:
    """`target(rank, *args, result)` on so many ranks, `result` a queue of its own for each; killed in the end."""
    port, results = free_port(), [context().Queue() for _ in range(world)]
    processes = [started(_as_rank, rank, world, port, target, (*args, results[rank])) for rank in range(world)]
    try:
        yield Ranks(processes, results)
    finally:
        for process in processes:
            process.kill()


def _as_rank(rank: int, world: int, port: int, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    target(rank, *args)


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
