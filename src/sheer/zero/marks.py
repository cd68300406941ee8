"""What leads from a parameter that is sharded to its values: a gradient hook that it carries, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sheer.zero.placing import Placed


class Mark:
    """On a parameter whose gradients are not listened to, so that it leads to its values."""

    __slots__ = ("built", "placed")

    def __init__(self, placed: Placed, *, built: bool = False) -> None:
        self.placed = placed
        self.built = built
        """Whether `Init` has put it there, so that an engine may take the values over."""

    def __call__(self, _param: torch.Tensor) -> None:
        """It gets no gradient that counts."""


def mark(param: torch.nn.Parameter, placed: Placed, *, built: bool = False) -> Any:
    """Put a mark on a floating parameter; the handle that removes it."""
    frozen = not param.requires_grad  # torch takes the hook only while the parameter requires a gradient
    param.requires_grad_(True)
    hook = Mark(placed, built=built)
    handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    param.requires_grad_(not frozen)
    return handle


def built_place_of(param: torch.Tensor) -> Placed | None:
    """Where `Init` has left the shards of `param`; None where it has not, or an engine has taken them over."""
    return next((hook.placed for hook in hooks_of(param).values() if isinstance(hook, Mark) and hook.built), None)


def unmark_built(param: torch.Tensor) -> None:
    """Its values are somewhere else now."""
    hooks = hooks_of(param)
    for key in [key for key, hook in hooks.items() if isinstance(hook, Mark) and hook.built]:
        del hooks[key]


def hooks_of(param: torch.Tensor) -> dict[int, Any]:
    """The hooks that torch calls when the gradient of `param` is there, in order."""
    return getattr(param, "_post_accumulate_grad_hooks", None) or {}
