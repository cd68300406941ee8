"""What the runtime asks of autograd's engine while a backward runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec

import torch

P = ParamSpec("P")

storage_of: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
"""What is the same for all views of one memory, filled or freed."""


def inside_backward() -> bool:
    """Whether autograd runs in this thread: a forward here is a checkpoint's second one."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(method: Callable[[], None]) -> None:
    """Call `method` when the backward that is running ends, if its object still lives."""
    torch.autograd.Variable._execution_engine.queue_callback(weakly(method))


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """`method`, without keeping its object alive; does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        live = reference()
        if live is not None:
            live(*args, **kwargs)

    return call
