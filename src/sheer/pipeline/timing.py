"""How long each unit takes on a sample: forward and backward, one after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from sheer.pipeline.units import Unit

_REPEATS = 3


class Stopwatch:
    """Runs units in order, each on what the one before it gave; `seconds` has the best of three runs of each."""

    def __init__(self, sample: Any) -> None:
        self.seconds: list[float] = []
        self._carry = sample

    def run(self, unit: Unit, root: nn.Module) -> None:
        """Measure `unit` on the carry that has been reached."""
        best = float("inf")
        output: Any = None
        with untouched(root):
            for _ in range(_REPEATS):
                carry = _pytree.tree_map_only(Tensor, _fresh, self._carry)
                began = time.perf_counter()
                output = unit(root, carry)
                _backward(output)
                best = min(best, time.perf_counter() - began)
        for parameter in root.parameters():
            parameter.grad = None
        self.seconds.append(best)
        self._carry = output


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Leave buffers and torch's CPU generator as they are now."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _backward(output: Any) -> None:
    tensors = [t for t in _pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])
