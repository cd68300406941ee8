"""Schedules that cannot run, and how that is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheer.errors import UsageError
from sheer.schedule import (
    GENERATORS,
    Action,
    Kind,
    Schedule,
    by_name,
    custom,
    in_flight,
    one_f_one_b,
    problems,
    shorten,
    simulate,
    validate,
    zero_bubble,
)

GOOD = ["F0 F1 B0 B1", "F0 B0 F1 B1"]


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (["F0 F1 B0", GOOD[1]], "stage 0: F1 has no backward"),
        (["F0 F0 F1 B0 B1", GOOD[1]], "stage 0: F0 runs twice"),
        (["F0 F1 B0 B1 B1", GOOD[1]], "stage 0: B1 runs twice"),
        (["B0 F0 F1 B1", GOOD[1]], "stage 0: B0 has no forward before it"),
        (["F0 B0", GOOD[1]], "stage 0: F1 is missing"),
        (["F0 F1 W0 I0 B1", GOOD[1]], "stage 0: W0 has no I before it"),
        (["F0 F1 I0 B1", GOOD[1]], "stage 0: I0 has no W"),
        (["F0 F1 I0 B0 W0 B1", GOOD[1]], "stage 0: B0 and I0 are both there"),
        (["F0 F1 B0 REDUCE STEP B1", GOOD[1]], "stage 0: REDUCE and STEP are not the end"),
        (["F0 F1 B0 B1 STEP", GOOD[1]], "stage 0: STEP does not follow REDUCE"),
        (["F0 F1 B0 B1 REDUCE", GOOD[1]], "stage 0: the list does not end with REDUCE STEP"),
        (["F0 F1", GOOD[1]], "stage 0: F0 has no backward"),
        (["F0 REDUCE STEP", "F0 REDUCE STEP"], "stage 0: REDUCE and STEP without any backward"),
        (["F0 F1.1 B0 B1.1", GOOD[1]], "stage 0: F0.1 is missing"),
    ],
)
def test_a_fault_names_stage_and_action(stages: list[str], says: str) -> None:
    assert any(says in problem for problem in problems(custom(stages)))
    with pytest.raises(UsageError, match="schedule 'custom' cannot run:\n"):
        validate(custom(stages))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"stages": 0}, "stages is 0; it must be 1 or more"),
        ({"stages": 3}, "there are lists for 2 stages, not 3"),
        ({"placement": (0, 0)}, "placement [0, 0] does not name each of the 2 stages 1 times"),
        ({"chunks": 2}, "does not name each of the 2 stages 2 times"),
        ({"micro_batches": 1}, "F1 is outside 1 micro-batches and 1 chunks"),
        ({"micro_batches": 3}, "F2 is missing"),
    ],
)
def test_numbers_that_do_not_fit_are_named(wrong: dict[str, object], says: str) -> None:
    assert any(says in problem for problem in problems(replace(custom(GOOD), **wrong)))  # type: ignore[arg-type]


def test_a_good_one_comes_back() -> None:
    schedule = custom(GOOD)
    assert validate(schedule) is schedule


def test_a_deadlock_names_every_stage_what_it_waits_for_and_who_should_give_it() -> None:
    stuck = custom(["F0 B0 F1 B1", "F0 F1 B0 B1"])
    with pytest.raises(UsageError) as raised:
        validate(stuck)
    said = str(raised.value)
    assert "stage 0 waits at B0 for B0 of stage 1, which waits at F1" in said
    assert "stage 1 waits at F1 for F1 of stage 0, which waits at B0" in said


def test_chunks_of_one_stage_in_the_wrong_order_are_a_deadlock() -> None:
    with pytest.raises(UsageError, match=r"stage 0 waits at F0.1 for F0 of stage 0, which waits at F0.1"):
        simulate(custom(["F0.1 F0 B0.1 B0"]))


def test_a_message_that_nobody_sends_is_said() -> None:
    with pytest.raises(UsageError, match="stage 1 waits at F1 for F1 of stage 0, which is nowhere in its list"):
        simulate(custom(["F0", "F0 F1"]))


def test_messages_received_in_another_order_than_sent_are_refused() -> None:
    crossed = problems(custom(["F0 F1 B0 B1", "F1 F0 B0 B1"]))
    assert len(crossed) == 1
    assert "stage 0 sends stage 1 the activation of micro-batch 0" in crossed[0]
    assert "where stage 1 receives that of micro-batch 1" in crossed[0]
    assert "use one order on both" in crossed[0]


@given(st.integers(2, 4), st.integers(1, 5), st.data())
def test_two_actions_swapped_run_or_are_refused_with_words(stages: int, count: int, data: st.DataObject) -> None:
    """Whatever the swap, the check and a free run agree on whether it ends."""
    schedule = data.draw(st.sampled_from([one_f_one_b(stages, count), zero_bubble(stages, count)]))
    stage = data.draw(st.integers(0, stages - 1))
    actions = list(schedule.actions[stage])
    a, b = (data.draw(st.integers(0, len(actions) - 3)) for _ in range(2))
    actions[a], actions[b] = actions[b], actions[a]
    swapped = replace(schedule, actions=(*schedule.actions[:stage], tuple(actions), *schedule.actions[stage + 1 :]))
    ends = _ends(swapped)
    said = problems(swapped)
    assert ends or said
    assert not ends or all("links deliver in order" in problem for problem in said)


def _ends(schedule: Schedule) -> bool:
    """By another way than the simulator: rounds of rules, each about one action."""
    done: set[tuple[int, Action]] = set()
    position = [0] * schedule.stages
    moved = True
    while moved:
        moved = False
        for stage, at in enumerate(position):
            if at < len(schedule.actions[stage]) and _ready(schedule, stage, schedule.actions[stage][at], done):
                done.add((stage, schedule.actions[stage][at]))
                position[stage] += 1
                moved = True
    return all(at == len(actions) for at, actions in zip(position, schedule.actions, strict=True))


def _ready(schedule: Schedule, stage: int, action: Action, done: set[tuple[int, Action]]) -> bool:
    k = action.micro_batch
    if action.kind is Kind.FORWARD:
        return stage == 0 or (stage - 1, Action(Kind.FORWARD, k)) in done
    if action.kind is Kind.WEIGHT:
        return (stage, Action(Kind.INPUT, k)) in done
    if action.kind in (Kind.BACKWARD, Kind.INPUT):
        after = stage == schedule.stages - 1 or (stage + 1, Action(action.kind, k)) in done
        return after and (stage, Action(Kind.FORWARD, k)) in done
    return True


@given(st.sampled_from(sorted(GENERATORS)), st.integers(1, 4), st.integers(1, 9), st.data())
def test_what_is_left_of_a_shortened_one_can_run(name: str, stages: int, count: int, data: st.DataObject) -> None:
    schedule = by_name(name, stages, count)
    fewer = data.draw(st.integers(1, count))
    short = validate(shorten(schedule, fewer))
    assert short.micro_batches == fewer
    for before, after in zip(schedule.actions, short.actions, strict=True):
        assert [action for action in before if action in after] == list(after)
        assert in_flight(after) <= in_flight(before)
