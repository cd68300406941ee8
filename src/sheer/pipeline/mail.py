"""What one stage sends and receives in a step: as many messages on each link as the schedule says, whatever happens.

A step that fails ends every unfinished link with a failure in place of the next message, and reads every unfinished
incoming link to its end. So nobody waits in vain, and all links are clean afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from sheer.comm import Links, Route
from sheer.pipeline.messages import Address, Parcel, Receiver, Sender
from sheer.pipeline.structure import Packed
from sheer.schedule import Action, Carried, Schedule, Transfer, receives, sends


class PeerFailed(Exception):  # noqa: N818
    """Another stage's step has failed; what happened is told at the end."""


class Item(NamedTuple):
    """One message: what it carries, and the virtual stage and micro-batch that it is for."""

    carried: Carried
    virtual: int
    micro_batch: int


def routes(schedule: Schedule) -> tuple[Route, ...]:
    """Every link that the schedule needs, in one order on all ranks."""
    found = {
        Route(stage, out.peer, out.kind.value): None
        for stage, actions in enumerate(schedule.actions)
        for action in actions
        for out in sends(schedule, stage, action)
    }
    return tuple(sorted(found))


class Mail:
    """This stage's messages of a step; those between two chunks of its own never leave the process."""

    def __init__(self, schedule: Schedule, stage: int, links: Links, device: torch.device) -> None:
        self._placement = schedule.placement
        self._stage = stage
        self._links = links
        actions = schedule.actions[stage]
        self._outgoing = Counter(r for a in actions for t in sends(schedule, stage, a) for r in [_out(stage, t)])
        self._incoming = Counter(r for a in actions for t in receives(schedule, stage, a) for r in [_into(stage, t)])
        self._proven = dict(_proofs(schedule, stage))
        self._senders = {route: Sender(links[route]) for route in self._outgoing}
        self._receivers = {route: Receiver(links[route], device, name=str(route)) for route in self._incoming}
        self._to_send: Counter[Route] = Counter()
        self._to_come: Counter[Route] = Counter()
        self._here: dict[Item, Parcel] = {}

    def begin(self) -> None:
        """A step begins: the first message of each link may come."""
        self._to_send, self._to_come = Counter(self._outgoing), Counter(self._incoming)
        self._here.clear()
        for route in self._incoming:
            self._links[route].expect()

    def post(self, item: Item, packed: Packed) -> None:
        """Send, without waiting."""
        route = self._route(item)
        if route.source == route.target:
            self._here[item] = Parcel(packed.blueprint, tuple(tensor.detach() for tensor in packed.tensors))
            return
        self._to_send[route] -= 1
        self._senders[route].send(packed, Address(item.virtual, item.micro_batch))

    def take(self, item: Item) -> Parcel:
        """Wait for a message. PeerFailed where a failure comes in its place."""
        if item in self._here:
            return self._here.pop(item)
        route = self._route(item)
        parcel = self._receivers[route].receive(Address(item.virtual, item.micro_batch))
        self._count_down(route, failed=parcel is None)
        if parcel is None:
            raise PeerFailed
        for sent, received in self._proven[item].items():
            done = self._outgoing[sent] - self._to_send[sent]
            self._links[sent].settle(keep=done - received)
        return parcel

    def _count_down(self, route: Route, *, failed: bool) -> None:
        self._to_come[route] = 0 if failed else self._to_come[route] - 1
        if self._to_come[route]:
            self._links[route].expect()

    def _route(self, item: Item) -> Route:
        producer = item.virtual + (-1 if item.carried is Carried.ACTIVATION else 1)
        return Route(self._placement[producer], self._placement[item.virtual], item.carried.value)

    def end(self) -> None:
        """All has been sent and received; take the buffers back."""
        for route in self._outgoing:
            self._links[route].settle()

    def fail(self) -> None:
        """Tell every stage that still waits for a message of ours. Waits for nobody."""
        self._here.clear()
        for route, left in self._to_send.items():
            if left:
                self._senders[route].fail()

    def end_in_failure(self) -> None:
        """After `fail`: take in what the others still send."""
        for route in self._incoming:
            while self._to_come[route]:
                self._count_down(route, failed=self._receivers[route].receive(None) is None)
        self.end()


def _out(stage: int, transfer: Transfer) -> Route:
    return Route(stage, transfer.peer, transfer.kind.value)


def _into(stage: int, transfer: Transfer) -> Route:
    return Route(transfer.peer, stage, transfer.kind.value)


def _proofs(schedule: Schedule, stage: int) -> Iterator[tuple[Item, dict[Route, int]]]:
    """For each message that `stage` receives: how many of its own must have arrived at the sender before it was sent.

    The buffers of those can be taken back without waiting, so what is held stays bounded however long a step is.
    """
    for peer, actions in enumerate(schedule.actions):
        received: Counter[Route] = Counter()
        for action in actions:
            received.update(_out(stage, t) for t in _between(schedule, stage, peer, action))
            for out in sends(schedule, peer, action):
                if out.peer == stage:
                    yield Item(out.kind, out.virtual, out.micro_batch), dict(received)


def _between(schedule: Schedule, stage: int, peer: int, action: Action) -> list[Transfer]:
    """What `peer` receives from `stage` for `action`, as `stage` sees it."""
    return [t._replace(peer=peer) for t in receives(schedule, peer, action) if t.peer == stage]
