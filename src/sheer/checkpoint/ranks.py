"""What this room asks of a group of ranks, and the one way it acts on all of them: work, then agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sheer.errors import CheckpointError, CommError

T = TypeVar("T")


class Axis(Protocol):
    """The ranks that save or load together. `sheer.comm.Axis` is one; a test may bring its own."""

    @property
    def rank(self) -> int:
        """This rank's index, 0 to `size - 1`."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def gather_objects(self, value: Any, /) -> list[Any]:
        """Collective: every rank gets every rank's object, in rank order."""

    def agree(self, error: BaseException | None, *, doing: str) -> None:
        """Collective: where any rank brings an error, every rank raises one error that lists them by rank."""

    def assemble(self, name: str, *, timeout: float) -> None:
        """Collective: wait for all ranks; after `timeout` seconds raise an error that names the missing ones."""


class Alone:
    """An `Axis` of one rank, for work without a process group."""

    rank, size = 0, 1

    def gather_objects(self, value: Any, /) -> list[Any]:
        """Its own."""
        return [value]

    def agree(self, error: BaseException | None, *, doing: str) -> None:
        """Raise its own error, which `doing` led to."""
        if error is not None:
            raise error

    def assemble(self, name: str, *, timeout: float) -> None:
        """All are there."""


def together(axis: Axis, doing: str, work: Callable[[], T]) -> T:
    """Run `work` on every rank and return its result; where any rank failed, raise on all. Collective.

    No rank goes on to the next phase while another has failed in this one, so nobody waits for a rank that left.
    """
    results: list[T] = []
    error: BaseException | None = None
    try:
        results.append(work())
    except BaseException as failure:  # an interrupt must reach the others too, or they would wait for this rank
        error = failure
    try:
        axis.agree(error, doing=doing)
    except CommError as agreed:
        _raise_interrupt(error)
        raise CheckpointError(str(agreed)) from (error or agreed)
    except CheckpointError:
        _raise_interrupt(error)
        raise
    assert error is None, "Axis.agree must raise when a rank brings an error"
    return results[0]


def on_first(axis: Axis, doing: str, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 only; every rank gets its result, or its error. Collective."""
    result = together(axis, doing, lambda: work() if axis.rank == 0 else None)
    shared: T = axis.gather_objects(result)[0]
    return shared


def _raise_interrupt(error: BaseException | None) -> None:
    """Ctrl-C and exit stay what they are on the rank that got them."""
    if error is not None and not isinstance(error, Exception):
        raise error
