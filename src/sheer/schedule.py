"""What happens when: a step as a list of actions, made by pure functions.

Gradient accumulation is a one-stage pipeline: F0 B0 F1 B1 REDUCE STEP.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from sheer.errors import UsageError


class Kind(Enum):
    """What an action does."""

    FORWARD = "F"
    """Run the module on a micro-batch."""
    BACKWARD = "B"
    """Its gradients join the accumulator; communication that can start, starts."""
    REDUCE = "REDUCE"
    """Gradients are where the optimizer wants them, averaged."""
    STEP = "STEP"
    """Clip, check, update, gather, clear."""


class Action(NamedTuple):
    """One thing to do; `micro_batch` is -1 where it concerns the whole step."""

    kind: Kind
    micro_batch: int = -1

    def __str__(self) -> str:
        return self.kind.value + (str(self.micro_batch) if self.micro_batch >= 0 else "")


def accumulate(micro_batches: int, *, first: int = 0) -> tuple[Action, ...]:
    """The actions of one step over micro-batches [first, micro_batches), on one stage."""
    if not 0 <= first < micro_batches:
        raise UsageError(f"a step of {micro_batches} micro-batches cannot start at number {first}")
    body = [Action(kind, k) for k in range(first, micro_batches) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    return (*body, Action(Kind.REDUCE), Action(Kind.STEP))


def faults(actions: tuple[Action, ...]) -> list[str]:
    """What is wrong with a one-stage schedule; empty when it can run: each backward after its forward, once, and the
    step after everything is reduced."""
    found = []
    forward: set[int] = set()
    backward: set[int] = set()
    for position, action in enumerate(actions):
        if action.kind is Kind.FORWARD:
            if action.micro_batch in forward:
                found.append(f"{action} runs twice")
            forward.add(action.micro_batch)
        elif action.kind is Kind.BACKWARD:
            if action.micro_batch not in forward or action.micro_batch in backward:
                found.append(f"{action} has no forward before it")
            backward.add(action.micro_batch)
        elif action.kind is Kind.STEP and (position == 0 or actions[position - 1].kind is not Kind.REDUCE):
            found.append("STEP does not follow REDUCE")
    found += [f"F{k} has no backward" for k in sorted(forward - backward)]
    return found
