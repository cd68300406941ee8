"""Every generator, over many sizes: what it makes can run, and is what the books say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheer.errors import UsageError
from sheer.schedule import (
    Carried,
    Kind,
    Schedule,
    Transfer,
    forward_only,
    gpipe,
    one_f_one_b,
    problems,
    receives,
    sends,
    simulate,
)

stages_of = st.integers(1, 8)
micro_batches_of = st.integers(1, 16)


def lines(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.actions]


@given(stages_of, micro_batches_of)
def test_everything_made_can_run(stages: int, micro_batches: int) -> None:
    assert problems(gpipe(stages, micro_batches)) == []
    assert problems(one_f_one_b(stages, micro_batches)) == []
    assert problems(forward_only(stages, micro_batches)) == []


@given(stages_of, st.integers(1, 4), micro_batches_of, st.randoms(use_true_random=False))
def test_evaluation_can_run_under_any_placement(stages: int, chunks: int, micro_batches: int, random) -> None:  # type: ignore[no-untyped-def]
    placement = list(range(stages)) * chunks
    random.shuffle(placement)
    assert problems(forward_only(stages, micro_batches, placement=tuple(placement))) == []


@given(stages_of, micro_batches_of)
def test_gpipe_and_1f1b_have_the_published_bubble(stages: int, micro_batches: int) -> None:
    published = (stages - 1) / (micro_batches + stages - 1)
    assert simulate(gpipe(stages, micro_batches)).bubble == pytest.approx(published)
    assert simulate(one_f_one_b(stages, micro_batches)).bubble == pytest.approx(published)


@given(stages_of, micro_batches_of)
def test_activations_held(stages: int, micro_batches: int) -> None:
    assert simulate(gpipe(stages, micro_batches)).in_flight == (micro_batches,) * stages
    books = tuple(min(stages - stage, micro_batches) for stage in range(stages))
    assert simulate(one_f_one_b(stages, micro_batches)).in_flight == books


def test_1f1b_reads_as_in_the_books() -> None:
    assert lines(one_f_one_b(3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3 REDUCE STEP",
        "F0 F1 B0 F2 B1 F3 B2 B3 REDUCE STEP",
        "F0 B0 F1 B1 F2 B2 F3 B3 REDUCE STEP",
    ]


def test_messages_follow_from_the_placement() -> None:
    schedule = one_f_one_b(3, 2)
    forward, backward = schedule.actions[1][0], schedule.actions[1][2]
    assert (forward.kind, backward.kind) == (Kind.FORWARD, Kind.BACKWARD)
    assert receives(schedule, 1, forward) == (Transfer(0, 1, 0, Carried.ACTIVATION),)
    assert sends(schedule, 1, forward) == (Transfer(2, 2, 0, Carried.ACTIVATION),)
    assert receives(schedule, 1, backward) == (Transfer(2, 1, 0, Carried.GRADIENT),)
    assert sends(schedule, 1, backward) == (Transfer(0, 0, 0, Carried.GRADIENT),)
    assert receives(schedule, 0, schedule.actions[0][0]) == ()
    assert sends(schedule, 2, schedule.actions[2][0]) == ()
    assert receives(schedule, 2, schedule.actions[2][1]) == ()
    assert sends(schedule, 0, schedule.actions[0][-1]) == ()


def test_neighbours_on_one_stage_send_nothing() -> None:
    schedule = forward_only(2, 1, placement=(0, 1, 1, 0))
    first, second = schedule.actions[1]
    assert sends(schedule, 1, first) == receives(schedule, 1, second) == ()
    assert sends(schedule, 1, second) == (Transfer(0, 3, 0, Carried.ACTIVATION),)


@pytest.mark.parametrize(("stages", "micro_batches"), [(0, 1), (1, 0)])
def test_impossible_numbers_are_refused(stages: int, micro_batches: int) -> None:
    for make in (gpipe, one_f_one_b, forward_only):
        with pytest.raises(UsageError, match="at least 1, not 0"):
            make(stages, micro_batches)
