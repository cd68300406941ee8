"""What the engine does around a module's calls where parameters are sharded; it stands in the compile room's slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.utils import _pytree

from sheer.zero.gathering import Call, Gathering, Unit
from sheer.zero.saving import Memory, begin_saving, end_saving
from sheer.zero.units import ROOT


class _Entered(NamedTuple):
    """A call that is running."""

    call: Call
    paused: bool
    """Whether parameters were watched until it began, and are not meanwhile."""
    saving: bool
    """Whether what autograd saves is marked."""


@final
class UnitGate:
    """Around the calls of one module: what it needs is whole meanwhile, and again when its backward comes."""

    def __init__(self, gathering: Gathering, units: tuple[Unit, ...]) -> None:
        self._gathering = gathering
        self._units = units
        own = frozenset(flat.memory for unit in units if unit.name != ROOT for flat in unit.flats)
        self._memory = Memory(own, gathering.blanks)
        self._entered: list[_Entered] = []

    def enter(self, inputs: Any) -> Any:
        """Before the call."""
        watched = self._gathering.outside.pause()
        try:
            call = self._gathering.enter(self._units)
        except BaseException:
            self._resume(watched)
            raise
        is_block = bool(self._memory.ours)
        saving = (
            is_block and torch.is_grad_enabled() and begin_saving(self._memory, partial(self._gathering.want, call))
        )
        self._entered.append(_Entered(call, watched and is_block, saving))
        self._resume(watched and not is_block)
        return inputs

    def _resume(self, watched: bool) -> None:
        if watched:
            self._gathering.outside.begin()

    def leave(self, output: Any) -> Any:
        """After the call."""
        self._end(output, follow=torch.is_grad_enabled())
        return output

    def abort(self) -> None:
        """Instead of `leave`, when the call raised."""
        if self._entered:
            self._end(None, follow=False)

    def _end(self, output: Any, *, follow: bool) -> None:
        call, paused, saving = self._entered.pop()
        watched = self._gathering.outside.pause() or paused
        if saving:
            end_saving()
        try:
            self._gathering.leave(call)
            if follow:
                watch(self._gathering, call, output)
        finally:
            self._resume(watched)


@final
class ModelGate:
    """Around the calls of the whole module, which set the pace of the plan."""

    def __init__(self, gathering: Gathering, units: tuple[Unit, ...]) -> None:
        self._gathering = gathering
        self._inner = UnitGate(gathering, units)
        self._watched: list[bool] = []  # for every call that is running, whether it was in another's

    def enter(self, inputs: Any) -> Any:
        """Before the call."""
        watched = self._gathering.outside.pause()
        self._gathering.begin_forward()
        try:
            inputs = self._inner.enter(inputs)
        except BaseException:
            self._gathering.abort_forward()
            if watched:
                self._gathering.outside.begin()
            raise
        self._watched.append(watched)
        self._gathering.outside.begin()
        return inputs

    def leave(self, output: Any) -> Any:
        """After the call."""
        with self._ending():
            output = self._inner.leave(output)
            self._gathering.end_forward()
        return output

    def abort(self) -> None:
        """Instead of `leave`, when the call raised."""
        if self._watched:
            with self._ending():
                self._inner.abort()
                self._gathering.abort_forward()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        outside = self._gathering.outside
        outside.end()
        try:
            yield
        finally:
            if self._watched.pop():
                outside.begin()


def watch(gathering: Gathering, call: Call, output: Any) -> None:
    """Let the backward of `call` be told as soon as the gradient of any of its outputs is there."""

    def tell(_grads: object) -> None:
        gathering.on_backward(call)

    for node in {tensor.grad_fn for tensor in tensors_in(output)}:
        if node is not None:
            node.register_prehook(tell)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's output, in containers, dataclasses and objects of any kind."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        for leaf in _pytree.tree_leaves(stack.pop()):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif id(leaf) not in seen and not isinstance(leaf, (nn.Module, type)):
                seen.add(id(leaf))
                if dataclasses.is_dataclass(leaf):
                    stack.append([getattr(leaf, one.name) for one in dataclasses.fields(leaf)])
                elif isinstance(leaf, Mapping):
                    stack.append(list(leaf.values()))
                elif isinstance(getattr(leaf, "__dict__", None), dict):
                    stack.append(list(vars(leaf).values()))
