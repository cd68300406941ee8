from __future__ import annotations

import itertools

import pytest

from tests.pairs import beginning, noted, pairs


def met(rows: list[tuple]) -> set[tuple]:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2, 2), (4, 3, 2, 2), (4, 4, 2, 3, 2), (5, 1, 3)])
def test_every_two_values_meet_in_few_rows(sizes: tuple[int, ...]) -> None:
    factors = [[f"{name}{number}" for number in range(size)] for name, size in zip("abcde", sizes, strict=False)]
    rows, product = pairs(*factors), list(itertools.product(*factors))
    assert met(rows) == met(product)
    assert len(set(rows)) == len(rows)
    least = max(a * b for a, b in itertools.combinations(sizes, 2))
    assert least <= len(rows) <= 1.5 * least
    assert rows == pairs(*factors)


def test_some_rows_are_always_there_and_some_never() -> None:
    def allowed(stage: int, world: int, compiled: dict) -> bool:
        return not (stage == 3 and world == 1)

    factors = (0, 1, 2, 3), (1, 2, 3), ({}, {"compile": True})
    always = [(3, 2, {"compile": True}), (0, 1, {})]
    rows = pairs(*factors, always=always, allowed=allowed)
    assert rows[:2] == always
    assert all(allowed(*row) for row in rows)
    for one, other in itertools.combinations(range(3), 2):
        wanted = [(row[one], row[other]) for row in itertools.product(*factors) if allowed(*row)]
        assert all(pair in [(row[one], row[other]) for row in rows] for pair in wanted)


def test_fewer_than_two_factors() -> None:
    assert pairs() == [()]
    assert pairs((1, 2)) == [(1,), (2,)]


def test_the_rest_of_rows_and_what_fails_with_one() -> None:
    assert beginning(2, [(1, "a"), (2, "a"), (2, "b")]) == [("a",), ("b",)]
    with pytest.raises(ZeroDivisionError) as caught, noted(2, "b"):
        _ = 1 / 0
    assert caught.value.__notes__ == ["with (2, 'b')"]
