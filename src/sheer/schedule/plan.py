"""The nouns of a schedule: what one action is, and the actions of all stages of a step.

A model cut into `stages * chunks` consecutive pieces has that many *virtual stages*, numbered in the order in which a
micro-batch passes them. `placement` says which pipeline stage holds each. An action names a piece by the stage that
runs it and by its chunk there. Messages follow from the placement; nobody writes them down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an action does."""

    FORWARD = "F"
    """Run the module on a micro-batch."""
    BACKWARD = "B"
    """Its gradients join the accumulator; communication that can start, starts."""
    INPUT = "I"
    """The first half of a backward: gradients of the inputs only, for the stage before."""
    WEIGHT = "W"
    """The second half of a backward: gradients of the weights join the accumulator."""
    REDUCE = "REDUCE"
    """Gradients are where the optimizer wants them, averaged."""
    STEP = "STEP"
    """Clip, check, update, gather, clear."""


class Action(NamedTuple):
    """One thing to do; `micro_batch` is -1 where it concerns the whole step."""

    kind: Kind
    micro_batch: int = -1
    chunk: int = 0

    def __str__(self) -> str:
        if self.micro_batch < 0:
            return self.kind.value
        return f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


ENDING = (Action(Kind.REDUCE), Action(Kind.STEP))
"""How the list of every stage of a training step ends."""


@dataclass(frozen=True)
class Schedule:
    """What every pipeline stage does in one step, in order.

    `placement[v]` is the stage that holds virtual stage `v`; `v` is that stage's chunk number so many as there are
    earlier virtual stages on it. `actions[s]` is stage `s`'s list. Holds whatever it is given; see `validate`.
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def virtual(self, stage: int, chunk: int) -> int:
        """The virtual stage that is chunk `chunk` of `stage`."""
        return [v for v, holder in enumerate(self.placement) if holder == stage][chunk]

    def chunk(self, virtual: int) -> int:
        """Which chunk of the stage that holds it virtual stage `virtual` is."""
        return self.placement[:virtual].count(self.placement[virtual])


def shorten(schedule: Schedule, micro_batches: int) -> Schedule:
    """`schedule` without the micro-batches from `micro_batches` on. What is left keeps its order, so it can run if
    `schedule` can, and holds no more."""
    kept = tuple(tuple(one for one in actions if one.micro_batch < micro_batches) for actions in schedule.actions)
    return replace(schedule, micro_batches=micro_batches, actions=kept)


class Carried(Enum):
    """What a message carries."""

    ACTIVATION = "activation"
    """What a virtual stage returned, for the next one's forward."""
    GRADIENT = "gradient"
    """The gradient of what a virtual stage was given, for the backward of the one before."""


class Transfer(NamedTuple):
    """One message between two pipeline stages; `virtual` is the virtual stage that consumes it."""

    peer: int
    virtual: int
    micro_batch: int
    kind: Carried

    def __str__(self) -> str:
        return f"{self.kind.value} of micro-batch {self.micro_batch}"


def receives(schedule: Schedule, stage: int, action: Action) -> tuple[Transfer, ...]:
    """What `stage` must have received before `action`; `peer` is the sender."""
    if action.kind not in _NEEDS:
        return ()
    carried, step = _NEEDS[action.kind]
    virtual = schedule.virtual(stage, action.chunk)
    return _between(schedule, carried, action.micro_batch, consumer=virtual, here=virtual, there=virtual + step)


def sends(schedule: Schedule, stage: int, action: Action) -> tuple[Transfer, ...]:
    """What `stage` sends after `action`; `peer` is the receiver."""
    if action.kind not in _NEEDS:
        return ()
    carried, step = _NEEDS[action.kind]
    virtual = schedule.virtual(stage, action.chunk)
    consumer = virtual - step
    return _between(schedule, carried, action.micro_batch, consumer=consumer, here=virtual, there=consumer)


# What an action consumes, and from which neighbour among the virtual stages. It makes the same for the other one.
_NEEDS = {
    Kind.FORWARD: (Carried.ACTIVATION, -1),
    Kind.BACKWARD: (Carried.GRADIENT, +1),
    Kind.INPUT: (Carried.GRADIENT, +1),
}


def _between(
    schedule: Schedule, carried: Carried, micro_batch: int, *, consumer: int, here: int, there: int
) -> tuple[Transfer, ...]:
    """The message between two neighbours: none beyond the ends of the model, none within a stage."""
    if not 0 <= there < len(schedule.placement) or schedule.placement[here] == schedule.placement[there]:
        return ()
    return (Transfer(schedule.placement[there], consumer, micro_batch, carried),)


def in_flight(actions: tuple[Action, ...]) -> int:
    """The most micro-batches, one counted per chunk, whose activations a stage holds at once: from F to B, or to W."""
    held = peak = 0
    for action in actions:
        held += action.kind is Kind.FORWARD
        peak = max(peak, held)
        held -= action.kind in (Kind.BACKWARD, Kind.WEIGHT)
    return peak
