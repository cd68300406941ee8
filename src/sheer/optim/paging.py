"""Optimizer state that has memory only while its bucket is updated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from sheer.optim.forms import StateForm, form_of

if TYPE_CHECKING:
    from sheer.optim.flat import FlatOptimizer


class Paging(Protocol):
    """What happens around the update of one master."""

    def expect(self, index: int) -> None:
        """Master `index` will be updated next."""

    def keep(self, index: int) -> None:
        """It has been updated, and what there is to do with the result has been done."""

    def adopt(self, rooms: dict[tuple[int, str], torch.Tensor]) -> None:
        """From now on state is in `rooms`: by master and key, as many elements as the master has."""


class NoPaging:
    """Everything stays in memory."""

    def expect(self, index: int) -> None:
        """It is there."""

    def keep(self, index: int) -> None:
        """It stays."""

    def adopt(self, rooms: dict[tuple[int, str], torch.Tensor]) -> None:
        """Where it stays is where it is."""


class BucketPaging:
    """One bucket's master and state are in memory, and the next one's on their way."""

    def __init__(self, optimizer: FlatOptimizer, states: Callable[[int], Mapping[str, torch.dtype]]) -> None:
        """`states` says what state a master will have, which gets its place at once: later the disk may be full."""
        self._optimizer = weakref.proxy(optimizer)
        self._depot = optimizer.depot
        self._rooms: dict[tuple[int, str], torch.Tensor] = {}
        for index in range(len(optimizer.masters)):
            for key, dtype in states(index).items():
                self._room(index, key, dtype)

    def expect(self, index: int) -> None:
        """See `Paging`."""
        for tensor in self._tensors(index):
            self._depot.expect(tensor)

    def keep(self, index: int) -> None:
        """See `Paging`. State that the optimizer has just made in memory of its own moves to where it is to rest."""
        start = self._optimizer.masters[index].owned.start
        for run in self._optimizer.runs_of(index):
            state = self._optimizer.base.state.get(run.tensor, {})
            for key, value in state.items():
                if form_of(value, run.tensor) == StateForm.ELEMENT and not self._depot.holds(value):
                    room = self._room(index, key, value.dtype)
                    state[key] = room[run.span.start - start : run.span.stop - start].view_as(value).copy_(value)
        for tensor in self._tensors(index):
            self._depot.rest(tensor)

    def adopt(self, rooms: dict[tuple[int, str], torch.Tensor]) -> None:
        """See `Paging`."""
        self._rooms = dict(rooms)
        for room in rooms.values():
            self._depot.rest(room)

    def _room(self, index: int, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Where state `key` of master `index` rests."""
        found = self._rooms.get((index, key))
        if found is None or found.dtype is not dtype:
            found = self._rooms[index, key] = self._depot.zeros(self._optimizer.masters[index].owned.numel, dtype)
        return found

    def _tensors(self, index: int) -> Iterator[torch.Tensor]:
        yield self._optimizer.masters[index].tensor
        yield from (room for (owner, _), room in self._rooms.items() if owner == index)
