"""Optimizer state on its way in: buffers for what was saved of each parameter, made runs again once they are filled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from sheer.layout import Interval, Slot, overlap
from sheer.optim.forms import StateForm, form_of
from sheer.optim.pieces import Master, Run, SavedState, StatePiece

if TYPE_CHECKING:
    from sheer.optim.flat import FlatOptimizer


class Incoming:
    """Buffers for a checkpoint's optimizer state, before it is adopted."""

    def __init__(
        self,
        optimizer: FlatOptimizer,
        saved: Mapping[str, Mapping[str, SavedState]],
        forms: Mapping[str, str],
        *,
        parked: Sequence[str],
        reuse: bool,
    ) -> None:
        self._optimizer = optimizer
        self._saved = saved
        self.forms = forms
        self._there = dict(self._state_there()) if reuse else {}
        self.elements: dict[tuple[int, str], torch.Tensor] = {}
        """By master and key: as many elements as the master has."""
        self._others: dict[tuple[str, str], torch.Tensor] = {}
        self.pieces: list[StatePiece] = []
        """In memory of their own."""
        self.in_use: list[StatePiece] = []
        """In memory of the state that there is: filling them changes it at once."""
        for index, master in enumerate(optimizer.masters):
            for piece in master.bucket.pieces(master.owned):
                for key, state in saved.get(piece.fqn, {}).items():
                    self._want(index, master, piece, key, state)
        for index, key in self.elements:
            if (index, key) not in self._there:
                self._zero_between(index, key)
        self.parked = [
            StatePiece(key, fqn, state.shape, 0, torch.zeros(prod(state.shape), dtype=state.dtype))
            for fqn in parked
            for key, state in saved[fqn].items()
        ]
        self.pieces += self.parked

    def _want(self, index: int, master: Master, piece: Any, key: str, state: SavedState) -> None:
        if self.forms.get(key) == StateForm.ELEMENT:
            there = self._there.get((index, key))
            if (index, key) not in self.elements:
                fresh = self._optimizer.depot.empty(master.owned.numel, state.dtype) if there is None else there
                self.elements[index, key] = fresh
            at = piece.offset - master.owned.start
            data = self.elements[index, key][at : at + piece.stop - piece.start]
            pieces = self.pieces if there is None else self.in_use
            pieces.append(StatePiece(key, piece.fqn, piece.shape, piece.start, data))
        else:
            data = torch.zeros(state.shape, dtype=state.dtype)
            self._others[piece.fqn, key] = data
            self.pieces.append(StatePiece(key, piece.fqn, state.shape, 0, data.view(-1)))

    def _state_there(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        """By master and key the state that there is, where it is what is to come but for its values."""
        optimizer = self._optimizer
        for index, master in enumerate(optimizer.masters):
            runs = optimizer.runs_of(index)
            if len(runs) != 1 or optimizer.whole_tensors:
                continue
            saved = [self._saved.get(piece.fqn, {}) for piece in master.bucket.pieces(master.owned)]
            for key, value in optimizer.base.state.get(runs[0].tensor, {}).items():
                if form_of(value, runs[0].tensor) != StateForm.ELEMENT or not value.is_contiguous():
                    continue
                if self.forms.get(key) == StateForm.ELEMENT and all(value.dtype == _dtype(s.get(key)) for s in saved):
                    yield (index, key), value.view(-1)

    def _zero_between(self, index: int, key: str) -> None:
        """Gaps, padding and what has no such state; the rest is about to be filled, so it is not touched twice."""
        master, elements, at = self._optimizer.masters[index], self.elements[index, key], 0
        for piece in master.bucket.pieces(master.owned):
            if key in self._saved.get(piece.fqn, {}):
                start = piece.offset - master.owned.start
                elements[at:start].zero_()
                at = start + piece.stop - piece.start
        elements[at:].zero_()

    def runs(self, index: int) -> Iterator[tuple[Run, dict[str, Any]]]:
        """The runs of one master: neighbours whose state is alike but for their elements."""
        optimizer = self._optimizer
        master = optimizer.masters[index]
        slots = [s for s in master.bucket.slots if overlap(Interval(s.start, s.stop), master.owned) is not None]
        if optimizer.whole_tensors:
            stretches = [[slot] for slot in master.bucket.slots]
        else:
            stretches = [list(group) for _, group in groupby(slots, key=self._history)]
        starts = [max(stretch[0].start, master.owned.start) for stretch in stretches]
        cuts = [*starts, master.owned.stop]
        cuts[0] = master.owned.start
        for stretch, start, stop in zip(stretches, cuts[:-1], cuts[1:], strict=True):
            yield self._restored(index, stretch[0], Interval(start, stop))
        if not stretches:
            yield optimizer.run_over(index, master.owned), {}

    def _history(self, slot: Slot) -> tuple[tuple[str, float | None], ...]:
        return tuple(
            (key, self._others[slot.fqn, key].item() if (slot.fqn, key) in self._others else None)
            for key in sorted(self._saved.get(slot.fqn, {}))
        )

    def _restored(self, index: int, first: Slot, span: Interval) -> tuple[Run, dict[str, Any]]:
        optimizer = self._optimizer
        master = optimizer.masters[index]
        if optimizer.whole_tensors:
            span = Interval(first.start, first.stop)
        run = optimizer.run_over(index, span)
        if optimizer.whole_tensors:
            run.tensor = run.tensor.view(first.shape)
        group = optimizer.base.param_groups[master.bucket.key.group or 0]
        on_device = bool(group.get("fused") or group.get("capturable"))
        state: dict[str, Any] = {}
        for key in self._saved.get(first.fqn, {}):
            form = self.forms.get(key)
            if form == StateForm.ELEMENT:
                at = span.start - master.owned.start
                state[key] = self.elements[index, key][at : at + span.numel].view_as(run.tensor)
            elif form == StateForm.NUMBER:
                state[key] = self._others[first.fqn, key].item()
            else:
                value = self._others[first.fqn, key].clone()
                state[key] = value.to(master.tensor.device) if on_device or form == StateForm.WHOLE else value
        return run, state


def _dtype(state: SavedState | None) -> torch.dtype | None:
    return None if state is None else state.dtype
