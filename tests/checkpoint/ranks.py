"""Ranks for tests: one alone, or several threads that meet at a barrier."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from sheer.checkpoint import Axis, Shard
from sheer.errors import CommError

T = TypeVar("T")


class Solo:
    rank, size = 0, 1

    def gather_objects(self, obj: Any) -> list[Any]:
        return [obj]

    def agree(self, error: BaseException | None, *, doing: str) -> None:
        if error is not None:
            raise CommError(f"{doing} failed on rank 0: {error}") from error

    def assemble(self, name: str, *, timeout: float) -> None:
        pass


class Meeting:
    """What the threads of one group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots: list[Any] = [None] * size


class Member:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.barrier.parties

    def gather_objects(self, obj: Any) -> list[Any]:
        self._meeting.slots[self.rank] = obj
        self._meeting.barrier.wait()
        everything = list(self._meeting.slots)
        self._meeting.barrier.wait()
        return everything

    def agree(self, error: BaseException | None, *, doing: str) -> None:
        errors = self.gather_objects(error)
        said = [f"rank {rank}: {e}" for rank, e in enumerate(errors) if e is not None]
        if said:
            raise CommError(f"{doing} failed: " + "; ".join(said))

    def assemble(self, name: str, *, timeout: float) -> None:
        present = self._meeting.barrier
        try:
            present.wait(timeout)
        except threading.BrokenBarrierError as error:
            raise CommError(f"{name}: not all ranks came within {timeout} s") from error


def on_ranks(size: int, body: Callable[[Axis], T]) -> list[T]:
    """Run `body` on `size` ranks; the results, or the first rank's error."""
    if size == 1:
        return [body(Solo())]
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(body, Member(meeting, rank)) for rank in range(size)]
        return [future.result() for future in futures]


def errors_on_ranks(size: int, body: Callable[[Axis], object]) -> list[Exception | None]:
    """Run `body` on `size` ranks; what each raised."""

    def caught(axis: Axis) -> Exception | None:
        try:
            body(axis)
        except Exception as error:
            return error
        return None

    return on_ranks(size, caught)


def whole(kind: str, name: str, value: torch.Tensor) -> Shard:
    return Shard(kind, name, tuple(value.shape), 0, value.detach().reshape(-1))


def cut(kind: str, name: str, value: torch.Tensor, *, cuts: Sequence[int]) -> list[Shard]:
    """The tensor as pieces that begin at 0 and at each of `cuts`."""
    flat = value.detach().reshape(-1)
    bounds = sorted({0, *(c for c in cuts if 0 < c < flat.numel()), flat.numel()})
    if flat.numel() == 0:
        return [whole(kind, name, value)]
    return [Shard(kind, name, tuple(value.shape), lo, flat[lo:hi]) for lo, hi in itertools.pairwise(bounds)]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the last bit, in shape and in dtype."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
