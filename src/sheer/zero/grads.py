"""A bucket's gradients: accumulated in a flat buffer, reduced over the data axis.

A bucket's gradient is *open* while backward may add to it, *in flight* while a lane holds it, *reduced* after. Hooks on
parameters only count. When all of a bucket's have come, their gradients are copied into the flat buffer in one call (no
zero fill) and `.grad` becomes a view of it, so that autograd accumulates the next ones in place. While a bucket is in
flight its parameters' `.grad` is None: a late gradient (a reentrant checkpoint, a second backward) then arrives in a
tensor of its own, and the bucket is opened again for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import NamedTuple, final

import torch

from sheer.comm import Arena, Copy, Depot, Lane, Ticket
from sheer.device import aligned_zeros
from sheer.errors import UsageError
from sheer.layout import Bucket, Interval, Placement
from sheer.zero.flat import FlatBucket


class GradState(Enum):
    """Where a bucket's gradient is between two steps."""

    EMPTY = "nothing since the last step"
    OPEN = "local sums, backward may add to them"
    IN_FLIGHT = "a lane reduces it"
    REDUCED = "summed over the axis"


class Wire(NamedTuple):
    """How gradients travel."""

    dtype: torch.dtype
    """They are rounded to this for the sum."""
    prescale: float
    """Multiplied in before the sum (1 unless a pre-divide factor is set); averaging undoes it."""


class Countdown:
    """Which parameters of a bucket a backward has reached: all that a hook touches, so it is kept small."""

    __slots__ = ("live", "pending", "reached")

    def __init__(self, count: int) -> None:
        self.live = False
        """Whether counting is enough; else the runtime must look (no backward is known of, or the bucket has left)."""
        self.pending = count
        self.reached = bytearray(count)

    def start(self) -> None:
        """A backward begins: all parameters have yet to come."""
        self.live = True
        self.pending = len(self.reached)
        self.reached = bytearray(self.pending)

    def reach(self, index: int) -> bool:
        """Parameter `index` has its gradient; whether nothing more needs to be done about it."""
        if not self.live:
            return False
        if not self.reached[index]:
            self.reached[index] = 1
            self.pending -= 1
        return self.pending > 0

    @property
    def started(self) -> bool:
        """Whether any parameter has been reached."""
        return self.pending < len(self.reached)


class BucketGrad(ABC):
    """The gradient of one trainable bucket; see the two placements below.

    local   [numel]  P  accumulation dtype; `.grad` of every parameter is a view of it while open
    """

    def __init__(
        self,
        flat: FlatBucket,
        *,
        rank: int,
        target: Placement,
        lane: Lane,
        arena: Arena,
        wire: Wire,
        depot: Depot,
    ) -> None:
        self.flat = flat
        self.state = GradState.EMPTY
        self.shard: Interval = flat.plan.shard(rank)
        self.visible = target is Placement.REPLICATED
        """Whether `.grad` can show the reduced gradient (it can where all of it is here)."""
        count = len(flat.params)
        self.used = bytearray(count)
        """Parameters that got a gradient since the last step."""
        self.countdown = Countdown(count)
        self.late = False
        """Whether gradients have come since this backward launched the bucket."""
        self._target = target
        self._lane = lane
        self._arena = arena
        self._wire = wire
        self._depot = depot
        self._ticket: Ticket | None = None
        self._copy = Copy()
        """Of the sum, to where it rests."""
        self._has = bytearray(count)  # the view holds this parameter's gradient
        self._detached = bytearray(count)  # we took `.grad` away; what is in the view still counts
        self._shown = bytearray(count)  # `.grad` shows the reduced gradient
        self._scale = 1.0  # of what is in the views, relative to the plain sum
        self._local: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._gaps: list[torch.Tensor] = []
        self._cuts = _cuts(flat.plan)
        self._device = flat.full.device
        self.hold(True)

    # --- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A new backward starts. Must come before autograd's first write."""
        self.countdown.start()
        self.late = False
        if self.state is GradState.REDUCED and self.visible:
            self.collect()
            self._detach()

    def require_hidden(self, index: int) -> None:
        """Refuse a backward that added to a gradient which `.grad` showed reduced: the two cannot be told apart."""
        if self._shown[index]:
            raise UsageError(
                f"parameter {self.flat.plan.slots[index].fqn!r}: a backward reached it after its gradient had been "
                "reduced, and neither engine(...) nor engine.backward(...) announced it. Call the model through the "
                "engine, or use engine.backward(loss)."
            )

    def open(self) -> None:
        """Make the buffer writable for backward, keeping what has been reduced already."""
        if self.state is not GradState.OPEN:
            self._open()

    def collect(self) -> None:
        """Bring what is in `.grad` into the buffer, and follow the user: None drops a gradient, another tensor replaces
        it. Afterwards every `.grad` is a view of the buffer or None."""
        fresh: list[tuple[torch.Tensor, torch.Tensor]] = []
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, param in enumerate(self.flat.params):
            grad, view = param.grad, self._views[index]
            if grad is view:
                continue
            if grad is not None:
                late = self._has[index] and self._detached[index]
                (added if late else fresh).append((view, _plain(grad)))
                param.grad = view
                self._has[index] = self.used[index] = 1
                self._detached[index] = 0
            elif self._has[index] and not self._detached[index]:
                view.zero_()
                self._has[index] = self.used[index] = 0
        if fresh:
            torch._foreach_copy_([view for view, _ in fresh], [grad for _, grad in fresh])
        if added:
            torch._foreach_add_([view for view, _ in added], [grad for _, grad in added])

    def heed_user(self) -> None:
        """Follow what the user did to `.grad` after it was reduced."""
        if self.state is GradState.OPEN or (self.state is GradState.REDUCED and self.visible):
            self.collect()

    # --- reduction --------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Submit the reduction of what is here; parameters without a gradient count as zero."""
        self.open()
        self.collect()
        assert self._local is not None
        for view, has in zip(self._views, self._has, strict=True):
            if not has:
                view.zero_()
        self._detach()
        self.countdown.live = self.late = False
        sent = self._to_wire(self._local)
        own = sent[self.shard.start : self.shard.stop]
        what = f"reduction of bucket {self.flat.plan.index} ({self.flat.plan.slots[-1].fqn})"
        self.state = GradState.IN_FLIGHT
        if self._target is Placement.REPLICATED:
            self._ticket = self._lane.all_reduce(sent, what=what)
            self._sent, self._part = sent, sent
        else:
            self._ticket = self._lane.reduce_scatter(own, sent, what=what)
            self._sent, self._part = sent, own
        if sent is not self._local:
            self._release_local(after=None)  # what travels is a copy

    def _detach(self) -> None:
        for param in self.flat.params:
            param.grad = None
        count = len(self._has)
        self._detached, self._shown = bytearray(b"\x01") * count, bytearray(count)

    def _to_wire(self, local: torch.Tensor) -> torch.Tensor:
        if self._wire.prescale != 1.0:
            local.mul_(self._wire.prescale)
        if self._wire.dtype is local.dtype:
            return local
        sent = self._arena.acquire(local.numel(), self._wire.dtype)
        return sent.copy_(local)

    def land(self) -> None:
        """Wait for the reduction and put its result where it belongs."""
        if self.state is not GradState.IN_FLIGHT:
            return
        assert self._ticket is not None
        self._ticket.wait()
        self._copy = self._settle(self._part)
        self.state = GradState.REDUCED
        if self._copy.done:
            self.vacate()

    def vacate(self) -> None:
        """Give back the buffers of the reduction, once what they hold has been copied."""
        if self._ticket is not None and self.state is GradState.REDUCED:
            self._copy.leave()
            self._take_back(self._ticket)

    def _take_back(self, ticket: Ticket) -> None:
        if self._sent is self._local:
            self._release_local(after=ticket)
        else:
            self._arena.release(self._sent, after=ticket)
        self._ticket = None
        del self._sent, self._part

    def average(self, factor: float) -> None:
        """Turn the sum into a mean: afterwards the owned part is `factor` times the plain sum. Idempotent."""
        if self._scale != factor:
            self.owned().mul_(factor / self._scale)
            self._scale = factor
        if self.visible:
            for index, param in enumerate(self.flat.params):
                if self._has[index]:
                    param.grad = self._views[index]
                    self._detached[index], self._shown[index] = 0, 1

    def clear(self) -> None:
        """Forget this step's gradient; `.grad` becomes None. Not even a peer that has failed can prevent it."""
        if self._ticket is not None:
            self._ticket.drop()
            self._copy.leave()
            self._take_back(self._ticket)
        for param in self.flat.params:
            param.grad = None
        count = len(self._has)
        self._has, self._detached, self._shown = bytearray(count), bytearray(count), bytearray(count)
        self.used = bytearray(count)
        self._scale = 1.0
        self.late = False
        self.state = GradState.EMPTY

    @abstractmethod
    def hold(self, hold: bool) -> None:
        """Whether there is memory for it on the device while it is EMPTY; there is from the start."""

    @abstractmethod
    def owned(self) -> torch.Tensor:
        """The reduced gradient of what this rank updates: [owned], accumulation dtype."""

    @abstractmethod
    def counted(self) -> torch.Tensor:
        """This rank's shard of the reduced gradient; over all ranks every element is in exactly one."""

    @abstractmethod
    def _open(self) -> None:
        """See `open`."""

    @abstractmethod
    def _settle(self, part: torch.Tensor) -> Copy:
        """Store the sum that has arrived; `part` must stay until the copy has left it."""

    @abstractmethod
    def _release_local(self, *, after: Ticket | None) -> None:
        """What was in the local buffer has been reduced by `after`, or copied."""

    def _make_views(self, local: torch.Tensor) -> None:
        self._local = local
        # One call for all; a view of its own only where the shape asks for one.
        cut = local.split_with_sizes(self._cuts)
        parts, self._gaps = cut[::2], [gap for gap in cut[1::2] if gap.numel()]
        self._zero_gaps()
        slots = self.flat.plan.slots
        self._views = [
            part if len(slot.shape) == 1 else part.view(slot.shape) for part, slot in zip(parts, slots, strict=True)
        ]

    def _zero_gaps(self) -> None:
        if self._gaps:
            torch._foreach_zero_(self._gaps)


@final
class ResidentGrad(BucketGrad):
    """grad P (stages 0 and 1): the local buffer stays; it is reduced in place at the boundary.

    Reopening turns R or S into P again without communication: every rank keeps its shard and zeroes the rest, so that
    each element's sum is held by one rank and the next reduction counts it once.
    """

    def hold(self, hold: bool) -> None:
        """See `BucketGrad`."""
        plan = self.flat.plan
        self._local, self._views, self._gaps = None, [], []
        if hold:
            self._make_views(aligned_zeros(plan.numel, dtype=plan.key.grad_dtype, device=self._device))

    @property
    def _buffer(self) -> torch.Tensor:
        assert self._local is not None
        return self._local

    def owned(self) -> torch.Tensor:
        """See `BucketGrad`."""
        return self._buffer[self.flat.owned.start : self.flat.owned.stop]

    def counted(self) -> torch.Tensor:
        """See `BucketGrad`."""
        return self._buffer[self.shard.start : self.shard.stop]

    def _open(self) -> None:
        self.land()
        if self.state is GradState.REDUCED:
            self._buffer[: self.shard.start].zero_()
            self._buffer[self.shard.stop :].zero_()
            if self._scale != 1.0:
                self.counted().mul_(1.0 / self._scale)
                self._scale = 1.0
        elif self.state is GradState.EMPTY:
            self._zero_gaps()  # clipping by a norm that was not a number has filled them with it
        self.state = GradState.OPEN

    def _settle(self, part: torch.Tensor) -> Copy:
        self._scale = self._wire.prescale
        home = self._buffer if self._target is Placement.REPLICATED else self.counted()
        if part.data_ptr() != home.data_ptr():
            home.copy_(part)
        return Copy()

    def _release_local(self, *, after: Ticket | None) -> None:
        """It stays."""


@final
class ShardedGrad(BucketGrad):
    """grad S (stages 2 and 3): the local buffer lives from a backward's first gradient to its reduction; the sum over
    micro-batches is kept as this rank's shard.

    summed  [shard]  S  accumulation dtype; on the device, or on the host where the optimizer works there
    """

    _fresh = True  # nothing has been summed since the last step

    def hold(self, hold: bool) -> None:
        """See `BucketGrad`."""
        self._summed = self._depot.zeros(self.shard.numel if hold else 0, self.flat.plan.key.grad_dtype)

    def owned(self) -> torch.Tensor:
        """See `BucketGrad`."""
        self._arrive()
        return self._summed

    def counted(self) -> torch.Tensor:
        """See `BucketGrad`."""
        self._arrive()
        return self._summed

    def clear(self) -> None:
        """See `BucketGrad`."""
        if self.state is GradState.OPEN:  # a backward that was never reduced
            self._release_local(after=None)
        super().clear()
        self._copy = Copy()
        self._fresh = True

    def _open(self) -> None:
        self.land()
        self.vacate()
        plan = self.flat.plan
        local = self._arena.acquire(plan.numel, plan.key.grad_dtype)
        self._make_views(local)
        count = len(self._has)
        self._has, self._detached = bytearray(count), bytearray(count)
        self.state = GradState.OPEN

    def _settle(self, part: torch.Tensor) -> Copy:
        self._arrive()
        fresh, self._fresh, self._scale = self._fresh, False, self._wire.prescale
        return (self._depot.take if fresh else self._depot.add)(self._summed, part)

    def _arrive(self) -> None:
        """The sum is where it rests."""
        self.vacate()
        self._copy.wait()

    def _release_local(self, *, after: Ticket | None) -> None:
        assert self._local is not None
        if after is None:
            self._arena.forget(self._local)
        else:
            self._arena.release(self._local, after=after)
        self._local, self._views, self._gaps = None, [], []


def _plain(grad: torch.Tensor) -> torch.Tensor:
    """`grad` without a graph of its own (create_graph) and dense (sparse embeddings)."""
    if grad.requires_grad:
        grad = grad.detach()
    return grad if grad.layout is torch.strided else grad.to_dense()


def _cuts(plan: Bucket) -> list[int]:
    """The lengths of slot, gap, slot, gap, ... of a bucket."""
    starts = [*(slot.start for slot in plan.slots[1:]), plan.numel]
    return [n for slot, start in zip(plan.slots, starts, strict=True) for n in (slot.numel, start - slot.stop)]
