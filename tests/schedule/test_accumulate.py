"""Schedules as plain data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheer.errors import UsageError
from sheer.schedule import Action, Kind, accumulate, faults


def test_accumulation_reads_as_in_the_books() -> None:
    assert " ".join(map(str, accumulate(2))) == "F0 B0 F1 B1 REDUCE STEP"


def test_a_step_can_go_on_where_it_was_left() -> None:
    assert " ".join(map(str, accumulate(3, first=2))) == "F2 B2 REDUCE STEP"


@given(st.integers(1, 50), st.data())
def test_every_schedule_is_valid(count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, count - 1))
    actions = accumulate(count, first=first)
    assert faults(actions) == []
    assert len(actions) == 2 * (count - first) + 2


@pytest.mark.parametrize(("count", "first"), [(0, 0), (2, 2), (2, -1)])
def test_impossible_starts_are_refused(count: int, first: int) -> None:
    with pytest.raises(UsageError, match="micro-batches"):
        accumulate(count, first=first)


@pytest.mark.parametrize(
    ("actions", "fault"),
    [
        ((Action(Kind.BACKWARD, 0),), "B0 has no forward"),
        ((Action(Kind.FORWARD, 0), Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0)), "F0 runs twice"),
        ((Action(Kind.FORWARD, 3),), "F3 has no backward"),
        ((Action(Kind.STEP),), "STEP does not follow REDUCE"),
    ],
)
def test_faults_name_the_action(actions: tuple[Action, ...], fault: str) -> None:
    assert any(fault in found for found in faults(actions))
