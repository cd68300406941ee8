"""The picture: everything is on it, once, where its time is."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheer.schedule import GENERATORS, Kind, Schedule, by_name, custom, one_f_one_b, simulate
from sheer.schedule.drawing import picture, shade, ticks, title, to_svg

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


@given(st.sampled_from(sorted(GENERATORS)), st.integers(1, 5), st.integers(1, 12), st.floats(0.01, 100))
def test_everything_is_within_the_picture_and_nothing_overlaps(
    name: str, stages: int, micro_batches: int, forward: float
) -> None:
    timeline = simulate(by_name(name, stages, micro_batches), cost=lambda kind, virtual: forward)
    drawn = picture(timeline)
    for box in drawn.boxes:
        assert 0 <= box.x <= box.x + box.width <= drawn.width
        assert 0 <= box.y <= box.y + box.height <= drawn.height
    rows: dict[float, list[tuple[float, float]]] = {}
    for box in drawn.boxes[: sum(1 + len(spans) for spans in timeline.spans)]:
        rows.setdefault(box.y, []).append((box.x, box.x + box.width))
    assert len(rows) == stages
    for (left, right), *boxes in rows.values():  # first the row itself
        assert all(left <= a and b <= right for a, b in boxes)
        assert all(b <= c for (_, b), (c, _) in itertools.pairwise(boxes))


def test_the_svg_is_xml_with_all_numbers() -> None:
    timeline = simulate(one_f_one_b(2, 3))
    root = ElementTree.fromstring(to_svg(timeline))
    texts = [str(text.text) for text in root.iter(f"{SVG}text")]
    numbers = [text for text in texts if text.isdigit()]
    assert numbers[:12] == list("010212" + "001122")
    assert "1f1b: 2 stages, 3 micro-batches" in texts
    assert "bubble 25.0 %" in texts
    assert "25.0 % idle, holds 2" in texts
    assert {"forward", "backward", "idle"} <= set(texts)
    assert "reduce" not in texts  # it takes no time here


def test_names_are_escaped() -> None:
    ElementTree.fromstring(to_svg(simulate(custom(["F0"], name="<a & b>"))))


def test_the_end_of_a_step_is_drawn_where_it_takes_time() -> None:
    timeline = simulate(one_f_one_b(1, 1), cost=lambda kind, virtual: 1.0)
    assert {"REDUCE", "STEP", "reduce", "step"} <= {one.text for one in picture(timeline).words}


def test_an_empty_schedule_is_no_error() -> None:
    to_svg(simulate(Schedule("nothing", 1, 1, 1, (0,), ((),))))


def test_titles_count() -> None:
    assert title(simulate(one_f_one_b(1, 1))) == "1f1b: 1 stage, 1 micro-batch"
    assert title(simulate(by_name("zb-v", 2, 3))) == "zb-v: 2 stages, 2 chunks each, 3 micro-batches"


def test_later_chunks_are_lighter() -> None:
    shades = [int(shade(Kind.FORWARD, chunk, 4)[1:3], 16) for chunk in range(4)]
    assert shades == sorted(set(shades))


@given(st.floats(1e-6, 1e9), st.integers(2, 30))
def test_ticks_are_few_and_within(length: float, most: int) -> None:
    places = ticks(length, most=most)
    assert places[0] == 0
    assert 1 <= len(places) <= most
    assert places[-1] <= length * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero-bubble", "zb-v"])
def test_the_pictures_in_the_docs_are_what_the_code_draws(name: str) -> None:
    drawn = to_svg(simulate(by_name(name, 4, 8)))
    assert (DOCS / f"schedule-{name}.svg").read_text(encoding="utf-8") == drawn
