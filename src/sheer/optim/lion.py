"""Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT


class Lion(Optimizer):
    """Evolved sign momentum. One state tensor per parameter, `exp_avg`; every element is updated by itself.

        update = sign(beta1 * exp_avg + (1 - beta1) * grad)
        param  = param * (1 - lr * weight_decay) - lr * update
        exp_avg = beta2 * exp_avg + (1 - beta2) * grad

    The update has magnitude `lr` in every element, so the paper's `lr` is 3 to 10 times smaller than AdamW's, and its
    `weight_decay` that much larger. Being elementwise it may be run on flat or sharded tensors.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if lr < 0.0:
            raise ValueError(f"lr={lr} must not be negative")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas={betas} must lie in [0, 1)")
        if weight_decay < 0.0:
            raise ValueError(f"weight_decay={weight_decay} must not be negative")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` (run with gradients) returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        grads = [param.grad for param in params if param.grad is not None]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        averages = [self._exp_avg(param) for param in params]
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
        updates = torch._foreach_lerp(averages, grads, 1.0 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(updates, lr)
        torch._foreach_sub_(params, updates)
        torch._foreach_lerp_(averages, grads, 1.0 - beta2)

    def _exp_avg(self, param: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        average: torch.Tensor = state["exp_avg"]
        return average
