"""State put together again from all ranks: whole tensors by name, and pieces for another layout.

For what is rare: reading one parameter's state, and a new plan after parameters were frozen or unfrozen. One tensor is
whole at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from sheer.comm import Axis
from sheer.optim.pieces import SavedState, StatePiece

_INLINE = 16  # elements: small states travel with the list of what there is


class _Offer(NamedTuple):
    """A rank's piece of a state, described; the values come along where they are few."""

    key: str
    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    values: torch.Tensor | None


class Whole(NamedTuple):
    """One state of one parameter, whole."""

    key: str
    fqn: str
    tensor: torch.Tensor


def describe(pieces: Iterable[StatePiece], axis: Axis) -> list[list[_Offer]]:
    """What every rank has, rank by rank. Collective on `axis`."""
    return axis.gather_objects(
        [
            _Offer(
                piece.key,
                piece.fqn,
                piece.shape,
                piece.data.dtype,
                piece.start,
                piece.start + piece.data.numel(),
                piece.data.cpu().clone() if piece.data.numel() <= _INLINE else None,
            )
            for piece in pieces
        ]
    )


def saved_states(offers: Iterable[Iterable[_Offer]]) -> dict[str, dict[str, SavedState]]:
    """The states there are, by parameter and key."""
    saved: dict[str, dict[str, SavedState]] = {}
    for rank in offers:
        for offer in rank:
            saved.setdefault(offer.fqn, {})[offer.key] = SavedState(offer.shape, offer.dtype)
    return saved


def wholes(
    pieces: Iterable[StatePiece], offers: list[list[_Offer]], *, axis: Axis, device: torch.device
) -> Iterator[Whole]:
    """Every state whole, one after the other, on every rank, in one order. Collective on `axis`."""
    mine = {(piece.key, piece.fqn, piece.start): piece.data for piece in pieces}
    by_name: dict[tuple[str, str], list[tuple[int, _Offer]]] = {}
    for rank, given in enumerate(offers):
        for offer in given:
            by_name.setdefault((offer.fqn, offer.key), []).append((rank, offer))
    for (fqn, key), parts in sorted(by_name.items()):
        first = parts[0][1]
        flat = torch.zeros(torch.Size(first.shape).numel(), dtype=first.dtype, device=device)
        seen: set[int] = set()
        for rank, offer in parts:
            if offer.start in seen:  # another replica of the same
                continue
            seen.add(offer.start)
            part = flat[offer.start : offer.stop]
            if offer.values is not None:
                part.copy_(offer.values)
                continue
            if rank == axis.rank:
                part.copy_(mine[key, fqn, offer.start])
            axis.broadcast(part, source=rank)
        yield Whole(key, fqn, flat.view(first.shape))


def fill(pieces: Iterable[StatePiece], source: Iterable[Whole]) -> None:
    """Copy from `source` what `pieces` want of it."""
    wanted: Mapping[tuple[str, str], list[StatePiece]] = _grouped(pieces)
    for whole in source:
        flat = whole.tensor.reshape(-1)
        for piece in wanted.get((whole.key, whole.fqn), ()):
            piece.data.copy_(flat[piece.start : piece.start + piece.data.numel()])


def _grouped(pieces: Iterable[StatePiece]) -> dict[tuple[str, str], list[StatePiece]]:
    grouped: dict[tuple[str, str], list[StatePiece]] = {}
    for piece in pieces:
        grouped.setdefault((piece.key, piece.fqn), []).append(piece)
    return grouped
