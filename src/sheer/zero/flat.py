"""A bucket's parameters as views of one flat buffer, and the fp32 master of what this rank updates.

The user's Parameter objects stay; only their `.data` moves. Nothing is stored on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sheer.device import aligned_zeros
from sheer.errors import UsageError
from sheer.layout import Bucket, Interval, Slot, overlap

if TYPE_CHECKING:
    from sheer.comm import Axis, Lane, Ticket

LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})


class FlatBucket:
    """Parameters of one bucket, at rest replicated.

    full    [numel]  R  compute dtype; every parameter is a view of it; gaps and padding are zero
    master  [owned]  the truth that the optimizer updates: fp32 beside a low-precision `full`, else a view of `full`
    """

    def __init__(
        self, plan: Bucket, params: Sequence[torch.nn.Parameter], *, owned: Interval, axis: Axis, device: torch.device
    ) -> None:
        self.plan = plan
        self.params = tuple(params)
        self.owned = owned
        self.has_master = plan.trainable and plan.key.dtype in LOW_PRECISION
        self._restored_grad_dtype = tuple(param.grad_dtype for param in self.params)
        # The master starts from the values the user gave, before any rounding to the compute dtype.
        staging_dtype = torch.float32 if self.has_master else plan.key.dtype
        staging = aligned_zeros(plan.numel, dtype=staging_dtype, device=device)
        for slot, param in zip(plan.slots, self.params, strict=True):
            staging[slot.start : slot.stop].copy_(param.detach().reshape(-1))
        axis.broadcast(staging)
        self.full = staging
        if self.has_master:
            self.full = aligned_zeros(plan.numel, dtype=plan.key.dtype, device=device).copy_(staging)
        own = self.full[owned.start : owned.stop]
        self.master = staging[owned.start : owned.stop].clone() if self.has_master else own
        self._views = tuple(self.full[slot.start : slot.stop].view(slot.shape) for slot in plan.slots)
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view
            param.grad = None
            if plan.trainable:
                param.grad_dtype = plan.key.grad_dtype

    @property
    def own(self) -> torch.Tensor:
        """The part of `full` that this rank updates: [owned], compute dtype."""
        return self.full[self.owned.start : self.owned.stop]

    def adopt(self) -> list[str]:
        """Take over parameters whose `.data` the user has replaced: their values move into the buffer.

        Returns their names. Raises UsageError where the new tensor has another shape.
        """
        adopted = []
        for slot, param, view in zip(self.plan.slots, self.params, self._views, strict=True):
            if param.is_set_to(view):
                continue
            if tuple(param.shape) != slot.shape:
                raise UsageError(
                    f"parameter {slot.fqn!r} was given data of shape {tuple(param.shape)}; the engine was built with "
                    f"{slot.shape}. Build a new engine after changing shapes."
                )
            given = param.detach().clone()  # it may be another view of the same memory
            if self.has_master:
                self._absorb_exactly(slot, given.reshape(-1))
            view.copy_(given)
            param.data = view
            adopted.append(slot.fqn)
        return adopted

    def _absorb_exactly(self, slot: Slot, given: torch.Tensor) -> None:
        """Let the master have what the buffer would round. A value that is the rounded master's is no change: it is
        what `module.float()` and a copy of the parameter hold."""
        part = overlap(Interval(slot.start, slot.stop), self.owned)
        if part is None:
            return
        master = self.master[part.start - self.owned.start :][: part.numel]
        value = given[part.start - slot.start :][: part.numel].to(master)
        torch.where(value != master.to(self.full.dtype), value, master, out=master)

    def absorb(self) -> None:
        """Let values that the user has changed in place win over the master; untouched ones keep their fp32 bits."""
        if self.has_master:
            changed = self.own != self.master.to(self.full.dtype)
            torch.where(changed, self.own.float(), self.master, out=self.master)

    def publish(self) -> None:
        """Round the master into this rank's part of `full`."""
        if self.has_master:
            self.own.copy_(self.master)

    def gather(self, lane: Lane) -> Ticket:
        """S -> R: every rank's updated part into every rank's `full`."""
        return lane.all_gather(self.full, self.own, what=f"gather of bucket {self.plan.index}")

    def release(self) -> None:
        """Give every parameter memory of its own again."""
        for param, grad_dtype, view in zip(self.params, self._restored_grad_dtype, self._views, strict=True):
            param.grad = None
            if param.is_set_to(view):
                param.data = param.data.clone()
            # Frozen ones too: they may have trained in an earlier plan.
            param.grad_dtype = param.dtype if grad_dtype is not None else None
