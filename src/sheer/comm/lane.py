"""Collectives of one axis, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

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
        self._under_way: deque[Ticket] = deque()
        self._beside: deque[Ticket] | None = None
        if axis.group is not None and axis.size > 1:
            native = dist.get_backend(axis.group) != "gloo"
            self._transport = NativeTransport(axis.group) if native else GlooTransport(axis.group, arena=arena)
            self._beside = None if native else self._under_way

    def _ticket(
        self,
        started: tuple[Sequence[dist.Work], Finish | None],
        held: tuple[torch.Tensor, ...],
        what: str,
        then: Finish | None,
    ) -> Ticket:
        """Of what has been submitted. gloo has two threads for what is under way: what they wait in vain for keeps all
        that follows from beginning, so whoever waits for that looks at them."""
        works, finish = started
        while self._under_way and self._under_way[0].done:
            self._under_way.popleft()
        ticket = Ticket(works, held, what, chain(finish, then), self._axis.absent, self._beside)
        self._under_way.append(ticket)
        return ticket

    def all_reduce(self, tensor: torch.Tensor, *, what: str, then: Finish | None = None) -> Ticket:
        """P -> R: sum `tensor` in place; `then` runs when it has been waited for."""
        if self._transport is None:
            return finished(then)
        self.counters.count("all_reduce", tensor, self._axis.size, what)
        with completing(what, self._axis.absent):
            started = self._transport.all_reduce(tensor)
        return self._ticket(started, (tensor,), what, then)

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
            started = self._transport.reduce_scatter(shard, full)
        return self._ticket(started, (full, shard), what, then)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, what: str, then: Finish | None = None) -> Ticket:
        """S -> R: every rank's `shard` to its place in `full`; `shard` may be that place."""
        if self._transport is None:
            if shard.data_ptr() != full.data_ptr():
                full.copy_(shard)
            return finished(then)
        self.counters.count("all_gather", full, self._axis.size, what)
        with completing(what, self._axis.absent):
            started = self._transport.all_gather(full, shard)
        return self._ticket(started, (full, shard), what, then)
