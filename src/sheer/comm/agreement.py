"""How ranks agree on errors, whatever they talk through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sheer import errors


def raise_together(error: BaseException | None, *, doing: str, size: int, gather: Callable[[Any], list[Any]]) -> None:
    """Raise one error on every rank if any rank brings one; the message lists them all, rank by rank.

    Collective: `gather` gives every rank what each of the `size` ranks told.
    """
    if size == 1:
        if error is not None:
            raise error
        return
    told: list[tuple[str, str] | None] = gather(None if error is None else (type(error).__name__, str(error)))
    failed = {rank: what for rank, what in enumerate(told) if what is not None}
    if not failed:
        return
    if error is not None and len(failed) == size and len(set(failed.values())) == 1:
        raise error  # the same on every rank: said once, with its own type
    listing = "\n".join(f"  rank {rank}: {name}: {message}" for rank, (name, message) in failed.items())
    first = next(iter(failed.values()))[0]
    known: type[errors.SheerError] = getattr(errors, first, errors.CommError)
    raise known(f"{doing} failed on {len(failed)} of {size} ranks:\n{listing}") from error
