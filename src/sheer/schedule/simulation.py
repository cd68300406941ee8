"""Running a schedule without tensors: when each action starts and ends, or which actions wait for each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sheer.errors import UsageError
from sheer.schedule.plan import Action, Kind, Schedule, in_flight

Cost = Callable[[Kind, int], float]
"""How long an action of this kind takes on this virtual stage, in any unit."""

EQUAL = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}


def equal_cost(kind: Kind, virtual: int) -> float:
    """The books' costs: a forward 1, each half of a backward 1, on every stage; the end of the step is free."""
    return EQUAL.get(kind, 0.0)


class Span(NamedTuple):
    """One action of one stage and its time."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule and when everything in it happens."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    """Per stage, in order."""
    critical: tuple[Span, ...]
    """The actions that set the length of the step, each waited for by the next, first to last."""

    @property
    def length(self) -> float:
        """From the first start to the last end."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Per stage, the share of the step in which it is idle, from 0 to 1."""
        return tuple(
            1 - sum(span.end - span.start for span in spans) / self.length if self.length else 0.0
            for spans in self.spans
        )

    @property
    def bubble(self) -> float:
        """The share of all stages' time that is idle, from 0 to 1."""
        return sum(self.bubbles) / len(self.bubbles)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the most micro-batches whose activations it holds at once, one counted per chunk."""
        return tuple(in_flight(actions) for actions in self.schedule.actions)


class _Event(NamedTuple):
    """What an action can wait for: the end of this on virtual stage `virtual`."""

    kind: Kind
    virtual: int
    micro_batch: int


def simulate(schedule: Schedule, *, cost: Cost = equal_cost, latency: float = 0.0) -> Timeline:
    """Play `schedule` with sends that take `latency` and cost nothing, and receives that block.

    Raises UsageError where stages wait for each other forever: it names the action at which each stopped, what that
    waits for and who should give it.
    """
    if not 0 <= latency < math.inf:
        raise UsageError(f"latency is {latency}; it must be 0 or more")
    run = _Run(schedule, cost, latency)
    while run.advance():
        pass
    if any(run.position[stage] < len(schedule.actions[stage]) for stage in range(schedule.stages)):
        raise UsageError("\n".join([f"schedule '{schedule.name}' stops for ever:", *run.waiting()]))
    return Timeline(schedule, tuple(map(tuple, run.spans)), run.critical())


class _Run:
    """The state of one simulation."""

    def __init__(self, schedule: Schedule, cost: Cost, latency: float) -> None:
        self.schedule, self.cost, self.latency = schedule, cost, latency
        self.position = [0] * schedule.stages
        self.spans: list[list[Span]] = [[] for _ in range(schedule.stages)]
        self.done: dict[_Event, Span] = {}
        self.cause: dict[Span, Span] = {}

    def advance(self) -> bool:
        """Run every stage as far as it gets; False where none got anywhere."""
        moved = False
        for stage, actions in enumerate(self.schedule.actions):
            while self.position[stage] < len(actions) and self._try(stage, actions[self.position[stage]]):
                self.position[stage] += 1
                moved = True
        return moved

    def _try(self, stage: int, action: Action) -> bool:
        needs = _needs(self.schedule, stage, action)
        if any(event not in self.done for event in needs):
            return False
        before = [(span.end, span) for span in self.spans[stage][-1:]]
        before += [self._arrival(stage, self.done[event]) for event in needs]
        start, cause = max(before, key=lambda one: one[0], default=(0.0, None))
        virtual = self.schedule.virtual(stage, action.chunk)
        span = Span(stage, action, start, start + self.cost(action.kind, virtual))
        if cause is not None:
            self.cause[span] = cause
        self.spans[stage].append(span)
        self.done[_Event(_half(action.kind), virtual, action.micro_batch)] = span
        return True

    def _arrival(self, stage: int, span: Span) -> tuple[float, Span]:
        return span.end + (self.latency if span.stage != stage else 0.0), span

    def critical(self) -> tuple[Span, ...]:
        last = max((spans[-1] for spans in self.spans if spans), key=lambda span: span.end, default=None)
        chain = []
        while last is not None:
            chain.append(last)
            last = self.cause.get(last)
        return tuple(reversed(chain))

    def waiting(self) -> list[str]:
        """One line per stage that did not finish."""
        lines = []
        for stage, actions in enumerate(self.schedule.actions):
            if self.position[stage] < len(actions):
                action = actions[self.position[stage]]
                missing = [e for e in _needs(self.schedule, stage, action) if e not in self.done]
                lines += [f"  stage {stage} waits at {action} for {self._describe(event)}" for event in missing]
        return lines

    def _describe(self, event: _Event) -> str:
        """The action that would give `event`, and where it stands."""
        giver, chunk = self.schedule.placement[event.virtual], self.schedule.chunk(event.virtual)
        names = [Action(kind, event.micro_batch, chunk) for kind in Kind if _half(kind) is event.kind]
        actions = self.schedule.actions[giver]
        found = [action for action in names if action in actions]
        if not found:
            return f"{names[0]} of stage {giver}, which is nowhere in its list"
        return f"{found[0]} of stage {giver}, which waits at {actions[self.position[giver]]}"


def _half(kind: Kind) -> Kind:
    """A whole backward gives what its first half gives."""
    return Kind.INPUT if kind is Kind.BACKWARD else kind


def _needs(schedule: Schedule, stage: int, action: Action) -> list[_Event]:
    """What must have ended before `action`, on this stage or another."""
    virtual = schedule.virtual(stage, action.chunk)
    last = len(schedule.placement) - 1
    k = action.micro_batch
    if action.kind is Kind.FORWARD:
        return [_Event(Kind.FORWARD, virtual - 1, k)] if virtual else []
    if action.kind is Kind.WEIGHT:
        return [_Event(Kind.INPUT, virtual, k)]
    if action.kind in (Kind.BACKWARD, Kind.INPUT):
        own = [_Event(Kind.FORWARD, virtual, k)]
        return own if virtual == last else [*own, _Event(Kind.INPUT, virtual + 1, k)]
    return []
