"""Gradients of parameters that several pipeline stages hold: summed over these stages after the data axis."""

from __future__ import annotations

from collections.abc import Sequence

from sheer.comm import Counters, Lane, Mesh
from sheer.zero.grads import BucketGrad


class TiedGrads:
    """The tied buckets of one stage. Every holder ends with the same sum, to the bit, and so makes the same update."""

    def __init__(self, grads: Sequence[BucketGrad], mesh: Mesh, counters: Counters) -> None:
        lanes = {holders: Lane(axis, counters=counters) for holders, axis in mesh.ties.items()}
        self.lanes = tuple(lanes.values())
        tied = [grad for grad in grads if grad.flat.plan.key.tie]
        # One order for all stages, whatever else they hold.
        tied.sort(key=lambda grad: (grad.flat.plan.key.tie, grad.flat.plan.slots[0].fqn))
        self._tied = [(grad, lanes[grad.flat.plan.key.tie]) for grad in tied]
        self._summed = False

    def sum(self) -> None:
        """Add up the reduced gradients of all holders. Once a step; collective on every tie axis."""
        if self._summed:
            return
        sums = [(grad.owned(), grad.owned().to(grad.flat.full.device), grad, lane) for grad, lane in self._tied]
        tickets = [
            lane.all_reduce(sent, what=f"sum of {grad.flat.plan.slots[0].fqn} over its stages")
            for _, sent, grad, lane in sums
        ]
        for ticket, (owned, sent, _, _) in zip(tickets, sums, strict=True):
            ticket.wait()
            if sent is not owned:
                owned.copy_(sent)
        self._summed = True

    def clear(self) -> None:
        """A new step begins."""
        self._summed = False
