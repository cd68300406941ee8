"""Collectives of one axis, in order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sheer.comm.arena import Arena
from sheer.comm.axis import Axis
from sheer.comm.counters import Counters
from sheer.comm.tickets import Finish, Ticket, chain, completing, finished
from sheer.comm.transport import GlooTransport, NativeTransport, Transport


class Lane:
    """Submits collectives of one axis in order. With one rank on the axis every ticket is already done."""

    def __init__(self, axis: Axis, *, counters: Counters | None = None, arena: Arena | None = None) -> None:
        """`counters` may be shared with other lanes; `arena` has the buffers that a backend needs besides."""
        self._axis = axis
        self.counters = Counters() if counters is None else counters
        self._transport: Transport | None = None
        if axis.group is not None and axis.size > 1:
            native = dist.get_backend(axis.group) != "gloo"
            self._transport = NativeTransport(axis.group) if native else GlooTransport(axis.group, arena=arena)

    def all_reduce(self, tensor: torch.Tensor, *, what: str, then: Finish | None = None) -> Ticket:
        """P -> R: sum `tensor` in place; `then` runs when it has been waited for."""
        if self._transport is None:
            return finished(then)
        self.counters.count("all_reduce", tensor, self._axis.size, what)
        with completing(what, self._axis.absent):
            works, finish = self._transport.all_reduce(tensor)
        return Ticket(works, (tensor,), what, chain(finish, then), self._axis.absent)

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, *, what: str, then: Finish | None = None
    ) -> Ticket:
        """P -> S: sum `full`, this rank's interval of it to `shard`, which may be its own place in `full`."""
        if self._transport is None:
            if shard.data_ptr() != full.data_ptr():
                shard.copy_(full)
            return finished(then)
        self.counters.count("reduce_scatter", full, self._axis.size, what)
        with completing(what, self._axis.absent):
            works, finish = self._transport.reduce_scatter(shard, full)
        return Ticket(works, (full, shard), what, chain(finish, then), self._axis.absent)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, what: str, then: Finish | None = None) -> Ticket:
        """S -> R: every rank's `shard` to its place in `full`; `shard` may be that place."""
        if self._transport is None:
            if shard.data_ptr() != full.data_ptr():
                full.copy_(shard)
            return finished(then)
        self.counters.count("all_gather", full, self._axis.size, what)
        with completing(what, self._axis.absent):
            works, finish = self._transport.all_gather(full, shard)
        return Ticket(works, (full, shard), what, chain(finish, then), self._axis.absent)
