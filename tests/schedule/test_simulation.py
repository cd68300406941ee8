"""The simulation against numbers worked out by hand."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sheer.schedule import GENERATORS, Kind, Schedule, by_name, custom, one_f_one_b, simulate, zero_bubble

MEASURED = {Kind.FORWARD: (1.0, 2.0), Kind.BACKWARD: (2.0, 4.0)}


def measured(kind: Kind, virtual: int) -> float:
    return MEASURED[kind][virtual] if kind in MEASURED else 0.0


def test_two_stages_by_hand() -> None:
    timeline = simulate(one_f_one_b(2, 2), cost=measured, latency=0.5)
    first, second = ([(str(s.action), s.start, s.end) for s in spans[:4]] for spans in timeline.spans)
    assert first == [("F0", 0, 1), ("F1", 1, 2), ("B0", 8, 10), ("B1", 14, 16)]
    assert second == [("F0", 1.5, 3.5), ("B0", 3.5, 7.5), ("F1", 7.5, 9.5), ("B1", 9.5, 13.5)]
    assert timeline.length == 16
    assert timeline.bubbles == (1 - 6 / 16, 1 - 12 / 16)
    assert timeline.bubble == 1 - 18 / 32
    critical = [f"{s.stage}:{s.action}" for s in timeline.critical]
    assert critical == ["0:F0", "1:F0", "1:B0", "1:F1", "1:B1", "0:B1", "0:REDUCE", "0:STEP"]


def test_latency_within_a_stage_is_none() -> None:
    assert simulate(custom(["F0 F0.1 B0.1 B0"]), latency=10).length == 6


@given(
    st.sampled_from(sorted(GENERATORS)),
    st.integers(1, 5),
    st.integers(1, 9),
    st.dictionaries(st.sampled_from(list(Kind)), st.integers(0, 5)),
    st.integers(0, 3),
)
def test_what_must_hold_at_any_cost(name: str, stages: int, count: int, costs: dict[Kind, int], latency: int) -> None:
    schedule = by_name(name, stages, count)
    timeline = simulate(schedule, cost=lambda kind, virtual: costs.get(kind, 1) * (1 + virtual % 2), latency=latency)
    for spans, actions in zip(timeline.spans, schedule.actions, strict=True):
        assert [span.action for span in spans] == list(actions)
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    chain = timeline.critical
    assert chain[0].start == 0
    assert chain[-1].end == timeline.length
    gaps = [b.start - a.end for a, b in itertools.pairwise(chain)]
    assert all(gap in (0, latency) for gap in gaps)
    assert all(0 <= share <= 1 for share in timeline.bubbles)


def test_dearer_actions_or_messages_never_make_it_shorter() -> None:
    schedule = zero_bubble(4, 8)
    plain = simulate(schedule).length
    assert simulate(schedule, latency=0.25).length > plain
    assert simulate(schedule, cost=lambda kind, virtual: 2.0 if virtual == 2 else 1.0).length > plain


def test_nothing_takes_no_time() -> None:
    nothing = simulate(Schedule("nothing", 1, 1, 1, (0,), ((),)))
    assert (nothing.length, nothing.bubble, nothing.critical, nothing.in_flight) == (0, 0, (), (0,))
