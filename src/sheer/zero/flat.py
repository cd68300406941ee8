"""A bucket's parameters in one flat buffer, and the fp32 master of what this rank updates.

The user's Parameter objects stay; only their `.data` moves. Nothing is stored on them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

import torch

from sheer import device as devices
from sheer.comm import Depots
from sheer.device import aligned_zeros
from sheer.errors import UsageError
from sheer.layout import Bucket, Interval, Layout, Place, Slot, overlap
from sheer.zero.autograd import storage_of

if TYPE_CHECKING:
    from sheer.comm import Axis, Lane, Ticket, Vault

Carry = Callable[[torch.Tensor, torch.device], torch.Tensor]
"""Takes a tensor somewhere, given the device that it is at home on."""

Source = Callable[[Slot, torch.nn.Parameter], torch.Tensor]
"""Where a parameter's first values come from: flat, whole and equal on all ranks. Collective, in plan order."""


class FlatBucket(ABC):
    """Parameters of one bucket; how they are at rest, see the two below.

    own     [owned]  compute dtype; what this rank updates of the bucket
    master  [owned]  the truth that the optimizer updates: fp32 beside a low-precision `own`, and a tensor of its own
                     where it rests in another place; else `own` itself
    """

    own: torch.Tensor
    master: torch.Tensor
    full: torch.Tensor
    """[numel], the whole bucket; see the two below for when it has memory."""
    _standing: tuple[torch.Tensor, ...]
    """What the parameters' `.data` is, unless the user has replaced it."""

    def __init__(
        self, plan: Bucket, params: Sequence[torch.nn.Parameter], *, layout: Layout, rank: int, depots: Depots
    ) -> None:
        self.plan = plan
        self.params = tuple(params)
        self.owned = layout.owned(plan, rank)
        self.has_master = layout.has_master(plan)
        self._master_dtype = layout.master_dtype(plan)
        self._host_may_look = layout.places.optim is not Place.DEVICE  # it waits for what it updates anyway
        self._depots = depots
        self._restored_grad_dtype = tuple(param.grad_dtype for param in self.params)

    def _move_in(self, standing: tuple[torch.Tensor, ...]) -> None:
        """Parameters stand on these from now on."""
        self._standing = standing
        for param, data in zip(self.params, standing, strict=True):
            param.data = data
            param.grad = None
            if self.plan.trainable:
                param.grad_dtype = self.plan.key.grad_dtype

    def adopt(self) -> list[str]:
        """Take over parameters whose `.data` the user has replaced: their values move into the buffer.

        Returns their names. Raises UsageError where the new tensor has another shape.
        """
        adopted = []
        for index, (slot, param, standing) in enumerate(zip(self.plan.slots, self.params, self._standing, strict=True)):
            if param.is_set_to(standing):
                continue
            if tuple(param.shape) != slot.shape:
                raise UsageError(
                    f"parameter {slot.fqn!r} was given data of shape {tuple(param.shape)}; the engine was built with "
                    f"{slot.shape}. Build a new engine after changing shapes."
                )
            given = param.detach().clone()  # it may be another view of the same memory
            self._check_given(slot, given)
            if self.has_master:
                self._absorb_exactly(slot, given.reshape(-1))
            self.write(index, given)
            param.data = standing
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
        torch.where(value != master.to(self.own.dtype), value, master, out=master)

    def absorb(self) -> None:
        """Let values that the user has changed in place win over the master; untouched ones keep their fp32 bits."""
        if self.has_master:
            own = self.own.to(self.master.device)
            rounded = self.master.to(own.dtype)
            if not (self._host_may_look and torch.equal(own, rounded)):
                torch.where(own != rounded, own.to(self.master.dtype), self.master, out=self.master)

    def publish(self) -> None:
        """Round the master into this rank's part of the parameters."""
        if self.has_master:
            self.own.copy_(self.master)

    def rest(self, part: torch.Tensor | None = None) -> None:
        """What this rank has at rest, or this `part` of it, will not be used for a while."""
        self._depots.optim.rest(self.master if part is None else part)
        self._depots.param.rest(self.own if part is None else part)

    def move_master(self, carry: Carry) -> None:
        """Take the master, where it is a tensor of its own, to where `carry` takes it."""
        if self.has_master:
            self.master = carry(self.master, self._depots.optim.device)

    def release(self, axis: Axis, *, lost: bool = False) -> None:
        """Give every parameter memory of its own again. Collective where parameters are sharded, unless they are
        `lost` because a peer is gone: then they get what they read as now."""
        for index, (param, grad_dtype) in enumerate(zip(self.params, self._restored_grad_dtype, strict=True)):
            param.grad = None
            mine = param.is_set_to(self._standing[index])
            value = param.data.clone() if lost else self.whole_value(index, axis)
            if mine:
                param.data = value
            # Frozen ones too: they may have trained in an earlier plan.
            param.grad_dtype = param.dtype if grad_dtype is not None else None

    @abstractmethod
    def move_params(self, carry: Carry) -> None:
        """Take what is at rest to where `carry` takes it; parameters stand on it there."""

    @abstractmethod
    def write(self, index: int, value: torch.Tensor) -> None:
        """Overwrite parameter `index` with `value`, whole and equal on all ranks; its master is the caller's."""

    @abstractmethod
    def whole_value(self, index: int, axis: Axis) -> torch.Tensor:
        """A copy of parameter `index`, in its shape. Collective on `axis` where parameters are sharded."""

    @abstractmethod
    def gather(self, lane: Lane) -> Ticket:
        """S -> R: every rank's own part to every rank."""

    @abstractmethod
    def _check_given(self, slot: Slot, given: torch.Tensor) -> None:
        """Refuse data that are no values of the parameter."""

    @abstractmethod
    def notice_writes(self, *, traceless: bool = False) -> None:
        """Bring what the user has written in place into `own`; with `traceless` also what was written through `.data`,
        which no version counts."""


@final
class ReplicatedFlat(FlatBucket):
    """At rest replicated (stages 0 to 2, and one rank alone).

    full    [numel]  R  compute dtype; every parameter is a view of it; gaps and padding are zero; `own` is a view of it
    """

    def __init__(
        self,
        plan: Bucket,
        params: Sequence[torch.nn.Parameter],
        *,
        layout: Layout,
        axis: Axis,
        device: torch.device,
        depots: Depots,
    ) -> None:
        super().__init__(plan, params, layout=layout, rank=axis.rank, depots=depots)
        self._home = device
        # The master starts from the values the user gave, before any rounding to the compute dtype.
        staging_dtype = self._master_dtype if self.has_master else plan.key.dtype
        staging = aligned_zeros(plan.numel, dtype=staging_dtype, device=device)
        for slot, param in zip(plan.slots, self.params, strict=True):
            staging[slot.start : slot.stop].copy_(param.detach().reshape(-1))
        axis.broadcast(staging)
        self.full = staging
        if staging_dtype is not plan.key.dtype:
            self.full = aligned_zeros(plan.numel, dtype=plan.key.dtype, device=device).copy_(staging)
        owned = self.owned
        self.own = self.master = self.full[owned.start : owned.stop]
        if self.has_master:
            self.master = depots.optim.zeros(owned.numel, staging_dtype).copy_(staging[owned.start : owned.stop])
            self.rest()
        self._move_in(views_of(self.full, plan))

    def move_params(self, carry: Carry) -> None:
        """See `FlatBucket`."""
        self.full = carry(self.full, self._home)
        self.own = self.full[self.owned.start : self.owned.stop]
        self.master = self.master if self.has_master else self.own
        self._standing = views_of(self.full, self.plan)
        for param, data in zip(self.params, self._standing, strict=True):
            param.data = data

    def write(self, index: int, value: torch.Tensor) -> None:
        """See `FlatBucket`."""
        self._standing[index].copy_(value)

    def whole_value(self, index: int, axis: Axis) -> torch.Tensor:
        """See `FlatBucket`."""
        return self._standing[index].clone()

    def gather(self, lane: Lane) -> Ticket:
        """See `FlatBucket`."""
        return lane.all_gather(self.full, self.own, what=f"gather of bucket {self.plan.index}")

    def _check_given(self, slot: Slot, given: torch.Tensor) -> None:
        """Anything is a value."""

    def notice_writes(self, *, traceless: bool = False) -> None:
        """`own` is where they were written."""


@final
class ShardedFlat(FlatBucket):
    """At rest sharded (stage 3, on several ranks or with offload).

    own     [shard]  S  compute dtype; rests on the device, the host or in files
    full    [numel]  R  compute dtype; has memory, and parameters are views of it, only while the bucket is whole

    Otherwise parameters stand on a placeholder of their shape and dtype: it reads as NaN (integers: the smallest), and
    in-place writes, `.numpy()` and `torch.save` raise. Never a crash, never a plausible value.
    """

    def __init__(
        self,
        plan: Bucket,
        params: Sequence[torch.nn.Parameter],
        *,
        layout: Layout,
        rank: int,
        source: Source,
        device: torch.device,
        vault: Vault,
        depots: Depots,
    ) -> None:
        super().__init__(plan, params, layout=layout, rank=rank, depots=depots)
        self.own = self.master = depots.param.zeros(self.owned.numel, plan.key.dtype)
        if self.has_master:
            self.master = depots.optim.zeros(self.owned.numel, self._master_dtype)
        self._vault = vault
        self.full = vault.make(plan.numel, plan.key.dtype)
        self._views = views_of(self.full, plan)
        vault.free(self.full)
        blank = _blank(plan.key.dtype, device)
        self.memory = storage_of(self.full)
        """Storage of what parameters are views of while the bucket is whole."""
        self.blank = storage_of(blank)
        """Storage of the placeholder."""
        self._blanks = tuple(blank.expand(slot.shape) for slot in plan.slots)
        self._whole = False
        self._versions = 0
        for index, (slot, param) in enumerate(zip(plan.slots, self.params, strict=True)):
            value = source(slot, param)
            self._own_part(slot, self.master, value)
            self.write(index, value)
        self.rest()
        self._move_in(self._blanks)

    @property
    def whole(self) -> bool:
        """Whether parameters have their values."""
        return self._whole

    def move_params(self, carry: Carry) -> None:
        """See `FlatBucket`. Parameters stand on their placeholders."""
        self.own = carry(self.own, self._depots.param.device)
        self.master = self.master if self.has_master else self.own

    def write(self, index: int, value: torch.Tensor) -> None:
        """See `FlatBucket`."""
        devices.synchronize({self.full.device})  # it may still be copying from `own`
        self._own_part(self.plan.slots[index], self.own, value.reshape(-1))
        if self._whole:
            self._views[index].copy_(value)

    def whole_value(self, index: int, axis: Axis) -> torch.Tensor:
        """See `FlatBucket`."""
        return assemble(self.plan, index, self.own, owned=self.owned, axis=axis, device=self.full.device)

    def _own_part(self, slot: Slot, home: torch.Tensor, flat: torch.Tensor) -> None:
        part = overlap(Interval(slot.start, slot.stop), self.owned)
        if part is not None:
            home[part.start - self.owned.start :][: part.numel].copy_(flat[part.start - slot.start :][: part.numel])

    def gather(self, lane: Lane) -> Ticket:
        """See `FlatBucket`. Follow it by `show` when the ticket has been waited for."""
        assert not self._whole
        self.adopt()
        return self.refill(lane)

    def refill(self, lane: Lane) -> Ticket:
        """`gather` for `full` alone, whatever its parameters stand on by now."""
        self._vault.fill(self.full)
        part = self.full[self.owned.start : self.owned.stop]
        with self._depots.param.brought(self.own, into=part) as shard:
            return lane.all_gather(self.full, shard, what=f"gather of {self.name}")

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"bucket {self.plan.index} ({self.plan.key.unit or 'outside blocks'}: {self.plan.slots[-1].fqn} ...)"

    def name_of(self, param: torch.nn.Parameter) -> str:
        """The name of `param`; empty where it is none of these."""
        return next((slot.fqn for slot, own in zip(self.plan.slots, self.params, strict=True) if own is param), "")

    def show(self) -> None:
        """All has been gathered: parameters have their values."""
        self._stand_on(self._views, whole=True)
        self._versions = self._count_writes()

    def hide(self, ticket: Ticket) -> None:
        """Give the memory back; `ticket` is the gather's. What was written in place is kept."""
        if self._whole:
            self.adopt()
            self.notice_writes()
            self._stand_on(self._blanks, whole=False)
        self._vault.free(self.full, after=ticket)

    def _stand_on(self, standing: tuple[torch.Tensor, ...], *, whole: bool) -> None:
        self._standing, self._whole = standing, whole
        for param, data in zip(self.params, standing, strict=True):
            param.data = data

    def _count_writes(self) -> int:
        """Grows with every in-place change of a parameter; a swap of `.data` does not count."""
        return sum(param._version for param in self.params)

    def notice_writes(self, *, traceless: bool = False) -> None:
        """See `FlatBucket`."""
        if self._whole and (traceless or self._versions != self._count_writes()):
            self._versions = self._count_writes()
            self.own.copy_(self.full[self.owned.start : self.owned.stop])

    def _check_given(self, slot: Slot, given: torch.Tensor) -> None:
        """A copy of the placeholder is what `module.to(dtype)` and its like make of a parameter that is not here."""
        if not self._whole and given.numel() and is_blank(given):
            raise UsageError(
                f"parameter {slot.fqn!r} was converted or copied while it was sharded (stage 3), so only a placeholder "
                "was: module.to(...), .half() and the like do not reach sharded values. Undo it: build the engine on a "
                "model of the wanted dtype, or change values inside sheer.zero.GatheredParameters"
            )


def assemble(
    plan: Bucket, index: int, part: torch.Tensor, *, owned: Interval, axis: Axis, device: torch.device
) -> torch.Tensor:
    """The whole of parameter `index`, in its shape, from every rank's `part` [owned] of something that goes with its
    bucket, on `device`, which ranks send from. Collective on `axis` unless this rank has all of it."""
    slot = plan.slots[index]
    if owned.numel == plan.numel:
        return part[slot.start : slot.stop].to(device, copy=True).view(slot.shape)
    whole = torch.empty(slot.numel, dtype=part.dtype, device=device)
    for rank in range(axis.size):
        shared = overlap(Interval(slot.start, slot.stop), plan.shard(rank))
        if shared is None:
            continue
        home = whole[shared.start - slot.start : shared.stop - slot.start]
        if rank == axis.rank:
            home.copy_(part[shared.start - owned.start :][: shared.numel])
        axis.broadcast(home, source=rank)
    return whole.view(slot.shape)


def views_of(full: torch.Tensor, plan: Bucket) -> tuple[torch.Tensor, ...]:
    """The parameters of a bucket in its buffer."""
    return tuple(full[slot.start : slot.stop].view(slot.shape) for slot in plan.slots)


def is_blank(value: torch.Tensor) -> bool:
    """Whether every element is what a placeholder reads as. Looks at the device."""
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().all())
    return value.dtype is not torch.bool and bool((value == torch.iinfo(value.dtype).min).all())


def blank_value(dtype: torch.dtype) -> float | int:
    """NaN; the smallest integer; False."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _blank(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element to expand to any shape: it can be read, and nothing else."""
    blank = torch.full((), blank_value(dtype), dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(blank)
    return blank
