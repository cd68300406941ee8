"""Schedules as people write them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheer.errors import UsageError
from sheer.schedule import GENERATORS, Action, Kind, by_name, custom, parse, problems, to_json, to_text

V = """
# there and back again
name: mine
placement: 0 1 1 0
stage 0: F0 F0.1 I0.1 W0.1
stage 0: I0 W0             # a list may go on
stage 1: F0 F0.1 B0.1 B0 REDUCE STEP
"""


@given(st.sampled_from(sorted(GENERATORS)), st.integers(1, 5), st.integers(1, 12))
def test_every_schedule_survives_being_written_down(name: str, stages: int, micro_batches: int) -> None:
    schedule = by_name(name, stages, micro_batches)
    assert parse(to_text(schedule)) == schedule
    assert parse(to_json(schedule)) == schedule


def test_text_is_read() -> None:
    schedule = parse(V)
    assert (schedule.name, schedule.stages, schedule.chunks, schedule.micro_batches) == ("mine", 2, 2, 1)
    assert " ".join(map(str, schedule.actions[0])) == "F0 F0.1 I0.1 W0.1 I0 W0 REDUCE STEP"
    assert problems(schedule) == []


def test_a_function_of_ones_own_gives_lists() -> None:
    def mine(count: int) -> list[list[Action]]:
        return [[Action(kind, k) for k in range(count) for kind in (Kind.FORWARD, Kind.BACKWARD)]]

    assert problems(custom(mine(3))) == []


def test_forwards_alone_get_no_ending() -> None:
    assert custom(["F0 F1", "F0 F1"]).actions[0][-1] == Action(Kind.FORWARD, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stage 0: F0 X1", "line 1 of the schedule: 'X1' is no action; write F3"),
        ("name: a\nstages 0: F0", "line 2 of the schedule: 'stages 0' is no key"),
        ("stage 0 F0", "line 1 of the schedule: 'stage 0 F0' is no key"),
        ("stage 0: F0\nstage 2: F0", r"lines for stages \[0, 2\]; number them"),
        ("", r"lines for stages \[\]"),
        ("placement: 0 x\nstage 0: F0", "line 1 of the schedule: placement names stages by number, not by 'x'"),
        ("{", "no JSON"),
        (json.dumps({"stage": []}), "unknown key 'stage'; there are name, placement and stages"),
        (json.dumps({"stages": "F0"}), "must be a list of texts"),
        (json.dumps({"stages": ["F0"], "placement": 0}), "must be a list of stages, not 0"),
        (json.dumps({"stages": ["F0"], "placement": [0.5]}), "placement names stages by number, not by 0.5"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(text)


@pytest.mark.parametrize("wrong", [object(), "F0 B0", [1, 2], [["F0", 3]], None])
def test_what_is_no_lists_of_actions_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="of type"):
        custom(wrong)  # type: ignore[arg-type]
