"""Schedules that people write: as text, as JSON, or as lists from a function of theirs.

    name: mine
    placement: 0 1 1 0            # optional: which stage holds each virtual stage; else 0 1 0 1
    stage 0: F0 F0.1 B0.1 B0      # F0.1 is the forward of micro-batch 0 in the second chunk of this stage
    stage 1: F0 F0.1 B0.1 B0

`REDUCE STEP` may be left out at the ends. In JSON: `{"name": ..., "placement": [...], "stages": ["F0 ...", ...]}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from sheer.errors import UsageError
from sheer.schedule.plan import ENDING, Action, Kind, Schedule

_TOKEN = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")
_STAGE = re.compile(r"stage\s+(\d+)")


def custom(
    stages: Sequence[str | Iterable[str | Action]], *, name: str = "custom", placement: Sequence[int] | None = None
) -> Schedule:
    """A schedule from one list of actions per stage: Actions, or text such as "F0 F1 B0 B1".

    The numbers of micro-batches and chunks are those that occur. Where there is a backward, REDUCE STEP is added to the
    lists that leave it out. Raises UsageError for text that is no action; whether it can run says `validate`.
    """
    if isinstance(stages, str) or not isinstance(stages, Iterable):
        raise UsageError(f"a schedule is one list of actions for each stage, not {_told(stages)}")
    lists = [tuple(map(_action, _one_stage(some))) for some in stages]
    work = [action for actions in lists for action in actions if action not in ENDING]
    if any(action.kind is not Kind.FORWARD for action in work):
        lists = [actions if set(ENDING) & set(actions) else (*actions, *ENDING) for actions in lists]
    micro_batches = 1 + max((action.micro_batch for action in work), default=-1)
    chunks = 1 + max((action.chunk for action in work), default=0)
    held = tuple(range(len(lists))) * chunks if placement is None else tuple(placement)
    return Schedule(name, len(lists), chunks, micro_batches, held, tuple(lists))


def parse(text: str) -> Schedule:
    """The schedule that `text` is, in either form. Raises UsageError that names the line or the key."""
    return _from_json(text) if text.lstrip().startswith("{") else _from_lines(text)


def to_text(schedule: Schedule) -> str:
    """`schedule` as text that `parse` reads."""
    head = [f"name: {schedule.name}", f"placement: {' '.join(map(str, schedule.placement))}"]
    lines = [f"stage {stage}: {' '.join(map(str, actions))}" for stage, actions in enumerate(schedule.actions)]
    return "\n".join([*head, *lines]) + "\n"


def to_json(schedule: Schedule) -> str:
    """`schedule` as JSON that `parse` reads."""
    stages = [" ".join(map(str, actions)) for actions in schedule.actions]
    return json.dumps({"name": schedule.name, "placement": schedule.placement, "stages": stages}, indent=2) + "\n"


def _one_stage(some: object) -> Iterable[Any]:
    if isinstance(some, str):
        return some.split()
    if isinstance(some, Iterable):
        return some
    raise UsageError(f'a stage is a list of actions or text such as "F0 F1 B0 B1", not {_told(some)}')


def _told(value: object) -> str:
    return f"a value of type {type(value).__name__}"


def _action(one: object) -> Action:
    if isinstance(one, Action):
        return one
    if not isinstance(one, str):
        raise UsageError(f'an action is a sheer.schedule.Action or text such as "F0", not {_told(one)}')
    for ending in ENDING:
        if one == ending.kind.value:
            return ending
    match = _TOKEN.fullmatch(one)
    if match is None:
        raise UsageError(
            f"'{one}' is no action; write F3 (forward of micro-batch 3), B3, I3, W3, F3.1 (in the second chunk), "
            "REDUCE or STEP"
        )
    return Action(Kind(match[1]), int(match[2]), int(match[3] or 0))


def _from_lines(text: str) -> Schedule:
    stages: dict[int, list[Action]] = {}
    name, placement = "custom", None
    for number, line in enumerate(text.splitlines(), start=1):
        key, colon, rest = (part.strip() for part in line.partition("#")[0].partition(":"))
        stage = _STAGE.fullmatch(key)
        try:
            if stage is not None and colon:
                stages.setdefault(int(stage[1]), []).extend(map(_action, rest.split()))
            elif key == "name" and colon:
                name = rest
            elif key == "placement" and colon:
                placement = _numbers(rest.split())
            elif key:
                raise UsageError(f"'{key}' is no key; write 'stage 0: F0 B0', 'placement: 0 1' or 'name: mine'")
        except UsageError as error:
            raise UsageError(f"line {number} of the schedule: {error}") from None
    if sorted(stages) != list(range(len(stages))) or not stages:
        raise UsageError(f"the schedule has lines for stages {sorted(stages)}; number them 0, 1, 2 and so on")
    return custom([stages[stage] for stage in range(len(stages))], name=name, placement=placement)


def _from_json(text: str) -> Schedule:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"the schedule is no JSON: {error}") from None
    unknown = sorted(set(content) - {"name", "placement", "stages"})
    if unknown:
        raise UsageError(f"the schedule has an unknown key '{unknown[0]}'; there are name, placement and stages")
    stages, placement = content.get("stages"), content.get("placement")
    if not isinstance(stages, list) or not all(isinstance(some, str) for some in stages) or not stages:
        raise UsageError('the schedule\'s "stages" must be a list of texts, one per stage, such as ["F0 B0", "F0 B0"]')
    if placement is not None and not isinstance(placement, list):
        raise UsageError(f'the schedule\'s "placement" must be a list of stages, not {placement!r}')
    name = str(content.get("name", "custom"))
    return custom(stages, name=name, placement=None if placement is None else _numbers(placement))


def _numbers(words: Iterable[object]) -> list[int]:
    """Whole numbers, from text or JSON."""
    words = list(words)
    wrong = [word for word in words if not re.fullmatch(r"\d+", str(word))]
    if wrong:
        raise UsageError(f"placement names stages by number, not by {wrong[0]!r}")
    return [int(str(word)) for word in words]
