"""What the engine does around a module's calls where parameters are sharded; it stands in the compile room's slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree

from sheer.zero.gathering import Call, Gathering, Unit


@final
class UnitGate:
    """Around the calls of one module: what it needs is whole meanwhile, and again when its backward comes."""

    def __init__(self, gathering: Gathering, units: tuple[Unit, ...]) -> None:
        self._gathering = gathering
        self._units = units
        self._calls: list[Call] = []

    def enter(self, inputs: Any) -> Any:
        """Before the call."""
        self._calls.append(self._gathering.enter(self._units))
        return inputs

    def leave(self, output: Any) -> Any:
        """After the call."""
        call = self._calls.pop()
        self._gathering.leave(call)
        if torch.is_grad_enabled():
            watch(self._gathering, call, output)
        return output

    def abort(self) -> None:
        """Instead of `leave`, when the call raised."""
        if self._calls:
            self._gathering.leave(self._calls.pop())


@final
class ModelGate:
    """Around the calls of the whole module, which set the pace of the plan."""

    def __init__(self, gathering: Gathering, units: tuple[Unit, ...]) -> None:
        self._gathering = gathering
        self._inner = UnitGate(gathering, units)

    def enter(self, inputs: Any) -> Any:
        """Before the call."""
        self._gathering.begin_forward()
        try:
            return self._inner.enter(inputs)
        except BaseException:
            self._gathering.abort_forward()
            raise

    def leave(self, output: Any) -> Any:
        """After the call."""
        output = self._inner.leave(output)
        self._gathering.end_forward()
        return output

    def abort(self) -> None:
        """Instead of `leave`, when the call raised."""
        self._inner.abort()
        self._gathering.abort_forward()


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
