"""Every generator, over many sizes: what it makes can run, and is what the books say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheer.errors import UsageError
from sheer.schedule import (
    GENERATORS,
    Carried,
    Kind,
    Schedule,
    Transfer,
    by_name,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    problems,
    receives,
    sends,
    simulate,
    zero_bubble,
    zero_bubble_v,
)

stages_of = st.integers(1, 8)
micro_batches_of = st.integers(1, 16)
few = settings(max_examples=50)


def lines(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.actions]


@few
@given(stages_of, micro_batches_of)
def test_everything_made_can_run(stages: int, micro_batches: int) -> None:
    for name in GENERATORS:
        assert problems(by_name(name, stages, micro_batches)) == []


@few
@given(stages_of, micro_batches_of, st.integers(1, 4))
def test_everything_made_can_run_with_any_number_of_chunks(stages: int, micro_batches: int, chunks: int) -> None:
    for name in (name for name, named in GENERATORS.items() if not named.fixed):
        schedule = by_name(name, stages, micro_batches, chunks=chunks)
        assert problems(schedule) == []
        assert schedule.chunks == chunks


@few
@given(stages_of, st.integers(1, 4), micro_batches_of, st.randoms(use_true_random=False))
def test_evaluation_can_run_under_any_placement(stages: int, chunks: int, micro_batches: int, random) -> None:  # type: ignore[no-untyped-def]
    placement = list(range(stages)) * chunks
    random.shuffle(placement)
    assert problems(forward_only(stages, micro_batches, placement=tuple(placement))) == []


@few
@given(stages_of, micro_batches_of)
def test_gpipe_and_1f1b_have_the_published_bubble(stages: int, micro_batches: int) -> None:
    published = (stages - 1) / (micro_batches + stages - 1)
    assert simulate(gpipe(stages, micro_batches)).bubble == pytest.approx(published)
    assert simulate(one_f_one_b(stages, micro_batches)).bubble == pytest.approx(published)


@few
@given(stages_of, micro_batches_of)
def test_activations_held(stages: int, micro_batches: int) -> None:
    assert simulate(gpipe(stages, micro_batches)).in_flight == (micro_batches,) * stages
    books = tuple(min(stages - stage, micro_batches) for stage in range(stages))
    assert simulate(one_f_one_b(stages, micro_batches)).in_flight == books


@few
@given(stages_of, st.integers(0, 16), st.integers(1, 4))
def test_interleaved_has_the_published_bubble_also_in_unequal_rounds(stages: int, more: int, chunks: int) -> None:
    micro_batches = stages + more
    timeline = simulate(interleaved(stages, micro_batches, chunks))
    assert timeline.bubble == pytest.approx((stages - 1) / (chunks * micro_batches + stages - 1))


@few
@given(stages_of, micro_batches_of, st.integers(2, 4))
def test_interleaving_is_worth_its_messages_and_shows_its_price(stages: int, micro_batches: int, chunks: int) -> None:
    cut, whole = simulate(interleaved(stages, micro_batches, chunks)), simulate(one_f_one_b(stages, micro_batches))
    assert cut.length <= whole.length * chunks
    assert max(cut.in_flight) <= chunks * micro_batches
    if micro_batches >= 2 * stages:
        assert cut.in_flight == tuple(
            (chunks - 1) * _longest_round(stages, micro_batches) + 2 * (stages - s) - 1 for s in range(stages)
        )


def _longest_round(stages: int, micro_batches: int) -> int:
    return -(-micro_batches // (micro_batches // stages))


def test_one_chunk_interleaved_is_1f1b() -> None:
    assert interleaved(3, 5, 1).actions == one_f_one_b(3, 5).actions


@few
@given(stages_of, st.integers(0, 16), st.integers(1, 4), st.sampled_from([(1, 1, 1), (2, 2, 1), (3, 2, 2), (2, 3, 1)]))
def test_zero_bubble_has_the_published_bubble(stages: int, more: int, chunks: int, costs: tuple[int, int, int]) -> None:
    micro_batches = stages + more
    price = dict(zip((Kind.FORWARD, Kind.INPUT, Kind.WEIGHT), costs, strict=True))
    timeline = simulate(zero_bubble(stages, micro_batches, chunks), cost=lambda kind, virtual: price.get(kind, 0))
    f, i, w = costs
    assert timeline.length == chunks * micro_batches * (f + i + w) + (stages - 1) * (f + i - w)


@few
@given(stages_of, micro_batches_of)
def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b(stages: int, micro_batches: int) -> None:
    most = max(simulate(one_f_one_b(stages, micro_batches)).in_flight)
    assert simulate(zero_bubble(stages, micro_batches)).in_flight == (most,) * stages
    assert max(simulate(zero_bubble_v(stages, micro_batches)).in_flight) <= 2 * most


@few
@given(stages_of, st.integers(0, 16))
def test_zb_v_has_no_bubble_within(stages: int, more: int) -> None:
    micro_batches = 2 * stages - 1 + more
    timeline = simulate(zero_bubble_v(stages, micro_batches))
    assert all(spans[-1].end - spans[0].start == 6 * micro_batches for spans in timeline.spans)


def test_1f1b_reads_as_in_the_books() -> None:
    assert lines(one_f_one_b(3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3 REDUCE STEP",
        "F0 F1 B0 F2 B1 F3 B2 B3 REDUCE STEP",
        "F0 B0 F1 B1 F2 B2 F3 B3 REDUCE STEP",
    ]


def test_zb_h1_reads_as_in_the_paper() -> None:
    assert lines(zero_bubble(3, 4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 REDUCE STEP",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3 REDUCE STEP",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 REDUCE STEP",
    ]


def test_names_are_known_or_near() -> None:
    assert by_name("interleaved", 2, 4).chunks == 2
    with pytest.raises(UsageError, match=r"no schedule '1f1'; there are gpipe, 1f1b, .* Did you mean '1f1b'\?"):
        by_name("1f1", 2, 4)
    with pytest.raises(UsageError, match="'zb-v' has 2 chunks a stage, not 3; any number works with interleaved, zero"):
        by_name("zb-v", 2, 4, chunks=3)


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
