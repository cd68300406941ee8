"""Activation checkpointing: which stretches of layers are computed a second time in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sheer.errors import UsageError
from sheer.pipeline.units import Unit


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """torch's activation checkpointing without a nested backward: integer inputs and frozen layers are fine."""
    return checkpoint(function, *args, use_reentrant=False)


@dataclass(frozen=True)
class Recompute:
    """How much of a stage is recomputed, and by what."""

    interval: int
    """Layers per stretch; 0: nothing is recomputed."""
    function: Callable[..., Any]
    """Called as `function(stretch, *inputs)`."""
    kinds: Sequence[str] | None
    """Class names of the layers that may be recomputed; None: every stretch that has parameters."""

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise UsageError(f"activation_checkpoint_interval is {self.interval}; it is a number of layers, or 0")

    def every(self, interval: int) -> Recompute:
        """The same with another interval."""
        return replace(self, interval=interval)

    def stretches(self, part: range) -> Iterator[range]:
        """`part` in pieces of `interval` layers."""
        size = self.interval or max(len(part), 1)
        for start in range(part.start, part.stop, size):
            yield range(start, min(start + size, part.stop))

    def run(self, root: nn.Module, units: Sequence[Unit], carry: Any) -> Any:
        """The units of one stretch, recomputed if they are to be."""

        def stretch(*inputs: Any) -> Any:
            value = inputs if packed else inputs[0]
            for unit in units:
                value = unit(root, value)
            return value

        packed = type(carry) is tuple  # tensors come as arguments of their own
        inputs = carry if packed else (carry,)
        if self.interval and torch.is_grad_enabled() and self._wanted(root, units):
            return self.function(stretch, *inputs)
        return stretch(*inputs)

    def _wanted(self, root: nn.Module, units: Sequence[Unit]) -> bool:
        if self.kinds is not None:
            return all(unit.kind in self.kinds for unit in units)
        return any(_has_parameters(root, name) for unit in units for name in unit.names)


def _has_parameters(root: nn.Module, name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    parent = root.get_submodule(owner)
    module = parent._modules.get(attribute)
    if module is None:
        return attribute in parent._parameters
    return next(module.parameters(), None) is not None
