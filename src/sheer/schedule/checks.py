"""Whether a schedule can run: every fault in words, before any process starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sheer.errors import UsageError
from sheer.schedule.plan import ENDING, Action, Carried, Kind, Schedule, receives, sends
from sheer.schedule.simulation import simulate

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT)


def validate(schedule: Schedule) -> Schedule:
    """`schedule` itself, or a UsageError with everything that is wrong with it."""
    found = problems(schedule)
    if found:
        raise UsageError("\n  ".join([f"schedule '{schedule.name}' cannot run:", *found]))
    return schedule


def problems(schedule: Schedule) -> list[str]:
    """What is wrong with `schedule`; empty when it can run.

    It can run when every micro-batch passes every virtual stage once, forwards before backwards; when nothing waits for
    ever; and when any two stages send in the order in which they receive, since links deliver in order.
    """
    found = _shape(schedule)
    if found:
        return found  # the rest would only follow from these
    trains = any(action.kind in _BACKWARDS for actions in schedule.actions for action in actions)
    for stage, actions in enumerate(schedule.actions):
        wrong = [*faults(actions, trains=trains), *_incomplete(schedule, actions, trains=trains)]
        found += [f"stage {stage}: {fault}" for fault in wrong]
    if found:
        return found
    try:
        simulate(schedule)
    except UsageError as error:
        return [str(error)]
    return _crossed(schedule)


def faults(actions: Sequence[Action], *, trains: bool = True) -> list[str]:
    """What is wrong with the list of one stage, whatever the others do: each backward after its forward and once, whole
    or as I then W, and the end of a step after everything. In evaluation (not `trains`) forwards stand alone."""
    found: list[str] = []
    seen: set[Action] = set()
    for position, action in enumerate(actions):
        if action in seen:
            found.append(f"{action} runs twice")
        found += _too_early(action, seen)
        seen.add(action)
        if action.kind is Kind.STEP and (position == 0 or actions[position - 1].kind is not Kind.REDUCE):
            found.append("STEP does not follow REDUCE")
        if action.kind is Kind.REDUCE and position != len(actions) - 2:
            found.append("REDUCE and STEP are not the end of the list")
    if trains:
        found += [f"{action} has no {_answer(action)}" for action in actions if _unanswered(action, seen)]
    return found


def _too_early(action: Action, seen: set[Action]) -> list[str]:
    """What must stand before `action` in the same list and does not, or must not stand beside it and does."""
    _, micro_batch, chunk = action
    if action.kind in _BACKWARDS and Action(Kind.FORWARD, micro_batch, chunk) not in seen:
        return [f"{action} has no forward before it"]
    if action.kind is Kind.WEIGHT and Action(Kind.INPUT, micro_batch, chunk) not in seen:
        return [f"{action} has no I before it"]
    others = {Kind.BACKWARD: Kind.INPUT, Kind.INPUT: Kind.BACKWARD}
    if action.kind in others:
        other = Action(others[action.kind], micro_batch, chunk)
        if other in seen:
            return [f"{action} and {other} are both there; a backward is whole (B) or halves (I and W)"]
    return []


def _answer(action: Action) -> str:
    return "W" if action.kind is Kind.INPUT else "backward"


def _unanswered(action: Action, seen: set[Action]) -> bool:
    """Whether a forward is never followed by a backward, or an I never by its W."""
    _, micro_batch, chunk = action
    if action.kind is Kind.FORWARD:
        return not any(Action(kind, micro_batch, chunk) in seen for kind in _BACKWARDS)
    return action.kind is Kind.INPUT and Action(Kind.WEIGHT, micro_batch, chunk) not in seen


def _shape(schedule: Schedule) -> list[str]:
    """Numbers that do not fit together."""
    found = []
    numbers = {"stages": schedule.stages, "chunks": schedule.chunks, "micro_batches": schedule.micro_batches}
    found += [f"{name} is {number}; it must be 1 or more" for name, number in numbers.items() if number < 1]
    if len(schedule.actions) != schedule.stages:
        found.append(f"there are lists for {len(schedule.actions)} stages, not {schedule.stages}")
    held = Counter(schedule.placement)
    if held != Counter(dict.fromkeys(range(schedule.stages), schedule.chunks)):
        found.append(
            f"placement {list(schedule.placement)} does not name each of the {schedule.stages} stages "
            f"{schedule.chunks} times"
        )
    return found


def _incomplete(schedule: Schedule, actions: Sequence[Action], *, trains: bool) -> list[str]:
    """Actions that are missing from one stage's list, or belong to no piece of it."""
    known = {(k, chunk) for k in range(schedule.micro_batches) for chunk in range(schedule.chunks)}
    ran = {(action.micro_batch, action.chunk) for action in actions if action.kind is Kind.FORWARD}
    found = [f"{Action(Kind.FORWARD, *missing)} is missing" for missing in sorted(known - ran)]
    found += [
        f"{action} is outside {schedule.micro_batches} micro-batches and {schedule.chunks} chunks"
        for action in actions
        if action not in ENDING and (action.micro_batch, action.chunk) not in known
    ]
    if trains and tuple(actions[-2:]) != ENDING:
        found.append("the list does not end with REDUCE STEP")
    if not trains and any(action in ENDING for action in actions):
        found.append("REDUCE and STEP without any backward")
    return found


def _crossed(schedule: Schedule) -> list[str]:
    """Streams of messages that are received in another order than sent."""
    sent: dict[tuple[int, int, Carried], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int, Carried], list[tuple[int, int]]] = {}
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            for out in sends(schedule, stage, action):
                sent.setdefault((stage, out.peer, out.kind), []).append((out.micro_batch, out.virtual))
            for into in receives(schedule, stage, action):
                received.setdefault((into.peer, stage, into.kind), []).append((into.micro_batch, into.virtual))
    found = []
    for (source, target, kind), out_order in sent.items():
        into_order = received[source, target, kind]  # the same messages: everything runs once and nothing waits
        first = next(((a, b) for a, b in zip(out_order, into_order, strict=True) if a != b), None)
        if first is not None:
            (a, at), (b, bt) = first
            found.append(
                f"stage {source} sends stage {target} the {kind.value} of micro-batch {a} (for chunk "
                f"{schedule.chunk(at)}) where stage {target} receives that of micro-batch {b} (for chunk "
                f"{schedule.chunk(bt)}); links deliver in order, so use one order on both"
            )
    return found
