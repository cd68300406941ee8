"""The order of gathers: every rank's own sequence fits into the agreed plan, and all ranks submit the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sheer.zero.order import Walk, complete, merge

UNITS = [f"blocks.{i}" for i in range(5)]
sequences = st.lists(st.sampled_from(UNITS), max_size=12)


def is_subsequence(part: list[str], whole: tuple[str, ...]) -> bool:
    rest = iter(whole)
    return all(unit in rest for unit in part)


def submitted(order: tuple[str, ...], own: list[str]) -> list[str]:
    """What a rank with this sequence of its own submits in one pass."""
    walk, sent = Walk(order), []
    for unit in own:
        passed = walk.reach(unit)
        assert passed is not None
        sent += [order[position] for position in passed] + [unit]
    return sent + [order[position] for position in walk.rest()]


@given(st.lists(sequences, min_size=1, max_size=4))
def test_every_rank_submits_the_whole_plan_in_order(records: list[list[str]]) -> None:
    plan = complete(merge(records), UNITS)
    assert set(plan) == set(UNITS)
    for record in records:
        assert is_subsequence(record, plan)
        assert tuple(submitted(plan, record)) == plan


@given(sequences)
def test_equal_records_are_the_plan(record: list[str]) -> None:
    assert merge([record, record, record]) == tuple(record)


def test_what_nobody_came_to_goes_after_what_precedes_it() -> None:
    assert complete(("b", "c"), ["a", "b", "b2", "c"]) == ("a", "b", "b2", "c")


def test_a_call_more_than_planned_is_in_no_plan() -> None:
    walk = Walk(("a", "b"))
    assert walk.reach("b") == range(1)
    assert walk.reach("a") is None
    assert walk.record == ["b", "a"]


def test_an_outer_block_is_over_when_those_inside_it_are() -> None:
    walk = Walk(("outer", "outer.inner", "before"))
    assert not walk.is_over("outer", 1)
    assert walk.is_over("outer", 2)
    assert walk.is_over("outer.inner", 2)
    assert not walk.is_over("before", 2)
    assert not walk.is_over("elsewhere", 2)
