"""Work under way: the lease on its buffers, and what a backend's failure is told as."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType

import torch
import torch.distributed as dist

from sheer.errors import CommError

Finish = Callable[[], None]

GLANCE = datetime.timedelta(seconds=1)
"""How long one waits before looking at what else is under way."""


class Ticket:
    """A collective under way. Holds its buffers; `wait` makes the current stream see the result. Idempotent."""

    __slots__ = ("_beside", "_finish", "_what", "_who", "_works", "held")

    def __init__(
        self,
        works: Sequence[dist.Work],
        held: tuple[torch.Tensor, ...],
        what: str,
        finish: Finish | None,
        who: Callable[[], str] = str,
        beside: Iterable[Ticket] | None = None,
    ) -> None:
        """`who` is asked for a sentence about the ranks that are missing, should it fail. `beside` is
        what else is under way, where that can keep this one from beginning: who waits long looks there."""
        self._works = works
        self._who = who
        self._what = what
        self._finish = finish
        self._beside = beside
        self.held = held

    @property
    def done(self) -> bool:
        """Whether it has been waited for."""
        return not self.held

    def wait(self) -> None:
        """Order the current stream behind this collective and give its buffers back."""
        if self.done:
            return
        with completing(self._what, self._who):
            for work in self._works:
                if self._beside is None:
                    work.wait()
                else:
                    _watch(work, self._beside)
        if self._finish is not None:
            self._finish()
        self._works, self._finish, self._beside, self.held = (), None, None, ()

    def look(self) -> None:
        """Raise if part of it has failed already. Waits for nothing."""
        with completing(self._what, self._who):
            for work in self._works:
                if work.is_completed():
                    work.wait()

    def drop(self) -> None:
        """Give the buffers back for a result that nobody wants any more, whether or not it comes."""
        with suppress(CommError):
            self.wait()
        self._works, self._finish, self._beside, self.held = (), None, None, ()


def _watch(work: dist.Work, beside: Iterable[Ticket]) -> None:
    """Wait for `work`, unless something beside it fails."""
    while True:
        try:
            work.wait(GLANCE)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # whatever it was: it raises that, or has come at the last moment
                return
            for ticket in [*beside]:
                ticket.look()
        else:
            return


class completing:  # noqa: N801
    """Says inside a `with` which operation it was that the backend could not do, and where to look; `who` says which
    ranks are missing, in a sentence or not at all."""

    __slots__ = ("_what", "_who")

    def __init__(self, what: str, who: Callable[[], str] = str) -> None:
        self._what, self._who = what, who

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CommError):
            raise CommError(
                f"{self._what} did not complete: {error}. {self._who()}A peer has failed, left, or is not taking part "
                "in the same operation; look for the first error among all ranks, and check that every rank runs the "
                "same number of forward/backward/step calls."
            ) from error


DONE = Ticket((), (), "nothing", None)


def chain(first: Finish | None, second: Finish | None) -> Finish | None:
    """Both, in order; what is None is left out."""
    if first is None or second is None:
        return first or second

    def both() -> None:
        first()
        second()

    return both


def finished(then: Finish | None) -> Ticket:
    """The ticket of something that needed no work; `then` has run."""
    if then is not None:
        then()
    return DONE
