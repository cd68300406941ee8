"""The optimizer object that `initialize` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sheer.errors import UsageError


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch Optimizer whose `step` is the engine's whole step: reduce, clip, update, gather, clear.

    `param_groups`, `state` and `defaults` are the very objects of the optimizer underneath, so that learning-rate
    schedulers may be built on either.
    """

    def __init__(self, base: torch.optim.Optimizer, *, step: Callable[[], Any], zero_grad: Callable[[], None]) -> None:
        super().__init__([torch.empty(0)], {})
        self.optimizer = base
        self.param_groups = base.param_groups
        self.state = base.state
        self.defaults = base.defaults
        self.overflow = False
        """Whether the last step was skipped because a gradient was not finite."""
        self._engine_step = step
        self._engine_zero_grad = zero_grad

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The engine's step; its StepResult at the accumulation boundary, else None."""
        if closure is not None:
            raise UsageError("optimizer.step takes no closure here: run forward and backward before it")
        return self._engine_step()

    def note_step(self, *, skipped: bool) -> None:
        """The engine has stepped. (torch's schedulers look at `_opt_called` to warn of a wrong order.)"""
        self.overflow = skipped
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients accumulated so far; `.grad` becomes None."""
        self._engine_zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after `initialize`: the flat buffers are planned from the groups. (torch calls it while building.)"""
        if not hasattr(self, "_engine_step"):
            super().add_param_group(param_group)
            return
        raise UsageError(
            "parameter groups cannot be added to a running engine; give all groups to sheer.initialize, with frozen "
            "parameters included, and unfreeze them with requires_grad_(True) when they should train"
        )

    def state_dict(self) -> dict[str, Any]:
        """Refused: the state is sharded, and a part of it under a whole's name would mislead."""
        raise UsageError(
            "optimizer.state_dict() would hold only this rank's shard; use engine.save_checkpoint(dir), or "
            "sheer.utils.safe_get_full_optimizer_state(param, key) for one tensor"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused, as `state_dict` is."""
        raise UsageError("optimizer state is loaded by engine.load_checkpoint(dir)")
