"""Reading a parameter where no call of its block runs, while parameters are sharded.

While the whole module is called, and none of its blocks is, every torch function is looked at: one that is given a
parameter which is not here gets it gathered first. Its unit then stays until the update, for the backward will want it.
From the first step it is known which parameters those are: they become part of what belongs to no block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode

_HARMLESS = frozenset(
    {"__hash__", "__len__", "data_ptr", "dim", "element_size", "get_device", "is_complex", "is_contiguous"}
    | {"is_floating_point", "ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook"}
    | {"requires_grad_", "retain_grad", "size", "stride"}
)
"""Methods that do not look at a value."""
_VALUES = frozenset({"H", "T", "data", "imag", "mH", "mT", "real"})
"""Attributes that do."""


@final
class OutsideReads(TorchFunctionMode):
    """Calls `read` with every parameter that is given to a torch function while it is active.

    A function that dynamo compiles is none: what it takes is whole, or NaN.
    """

    def __init__(self, read: Callable[[torch.nn.Parameter], None]) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Before `func` is run as ever."""
        kwargs = kwargs or {}
        if not torch.compiler.is_dynamo_compiling():
            for param in parameters_in(args, kwargs):
                if looks_at_values(func):
                    self._read(param)
        return func(*args, **kwargs)

    def begin(self) -> None:
        """Active from here on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Not active any more."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def pause(self) -> bool:
        """Not active from here on. False where it is not the innermost mode, or not active: then nothing happens."""
        depth = torch._C._len_torch_function_stack()
        if not depth or torch._C._get_function_stack_at(depth - 1) is not self:
            return False
        self.end()
        return True


def parameters_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.nn.Parameter]:
    """The parameters among a function's arguments, or in a list there."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (one for one in value if isinstance(one, torch.nn.Parameter))


def looks_at_values(func: Any) -> bool:
    """Whether a torch function may read or write values of its arguments, or give views of them."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") in _VALUES
    return name not in _HARMLESS


def recorded() -> int:
    """A moment, by what autograd has recorded in this thread; for `read_since`."""
    moment: int = torch._C._autograd._get_sequence_nr()
    return moment


def read_since(moment: int, tensor: torch.Tensor) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Parameters that operations after `moment` read on the way to `tensor`, and when. Looks at no others."""
    seen: set[Any] = {None}
    stack: list[Any] = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen or node._sequence_nr() < moment:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            param = getattr(following, "variable", None)
            if isinstance(param, torch.nn.Parameter):
                yield param, node._sequence_nr()
            else:
                stack.append(following)
