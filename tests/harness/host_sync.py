"""A steady training step must not wait for the device. On a CPU nothing waits; so forbid what would, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that read a value from the device to go on, or need one to know their output's shape.
SYNCING_OPS = {
    "aten::_local_scalar_dense",  # item(), bool(), int(), float(), `if tensor:`
    "aten::equal",
    "aten::allclose",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::bincount",
}
# Methods that move a tensor to the host; on a CPU they dispatch no operator.
SYNCING_METHODS = {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}


class HostSync(AssertionError):
    """Something asked for a value that only the device knows yet."""


class _Budget:
    """How many reads may still happen."""

    def __init__(self, reads: int) -> None:
        self.left = reads

    def spend(self, what: str) -> None:
        if not self.left:
            raise HostSync(f"{what} makes the host wait for the device")
        self.left -= 1


class _Operators(TorchDispatchMode):
    def __init__(self, budget: _Budget) -> None:
        super().__init__()
        self._budget = budget

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in SYNCING_OPS or _is_boolean_index(func, args):
            self._budget.spend(func._schema.name)
        return func(*args, **(kwargs or {}))


def _is_boolean_index(func: Any, args: Any) -> bool:
    """`t[mask]`: how many there are is known on the device only."""
    masks = (torch.bool, torch.uint8)
    return func._schema.name == "aten::index" and any(i is not None and i.dtype in masks for i in args[1])


class _Methods(TorchFunctionMode):
    def __init__(self, budget: _Budget) -> None:
        super().__init__()
        self._budget = budget

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SYNCING_METHODS:
            self._budget.spend(f"Tensor.{func.__name__}()")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_sync(*, reads: int = 0) -> Iterator[None]:
    """Raise `HostSync` where the block would make the host wait, in this thread; `reads` of them are to happen."""
    budget = _Budget(reads)
    with ExitStack() as modes:
        modes.enter_context(_Operators(budget))
        modes.enter_context(_Methods(budget))
        yield
    assert budget.left == 0, f"{budget.left} of {reads} expected reads did not happen"
