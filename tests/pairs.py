"""Few rows in place of a full product: every two values of different factors meet in at least one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Row = tuple[Any, ...]


def pairs(
    *factors: Sequence[Any], always: Sequence[Row] = (), allowed: Callable[..., bool] = lambda *_: True
) -> list[Row]:
    """Rows of one value of each factor; `always` come first, and of the others only those that are `allowed`.

    Two values that no allowed row has together are left out. The same rows in the same order in every process.
    """
    if len(factors) < 2:
        return [row for row in itertools.product(*factors) if allowed(*row)]
    numbered = [range(len(factor)) for factor in factors]
    rows = {
        row: frozenset(itertools.combinations(enumerate(row), 2))
        for row in itertools.product(*numbered)
        if allowed(*_values(factors, row))
    }
    missing = frozenset().union(*rows.values())
    chosen = []
    for row in always:
        chosen.append(tuple(list(factor).index(value) for factor, value in zip(factors, row, strict=True)))
        missing -= rows[chosen[-1]]
    while missing:
        chosen.append(max(rows, key=lambda row: len(rows[row] & missing)))  # the first of the best
        missing -= rows[chosen[-1]]
    return [_values(factors, row) for row in chosen]


def beginning(first: Any, rows: Sequence[Row]) -> list[Row]:
    """The rest of those rows: what a test of one world size goes through."""
    return [row[1:] for row in rows if row[0] == first]


@contextmanager
def noted(*row: Any) -> Iterator[None]:
    """What fails inside says for which values."""
    try:
        yield
    except Exception as error:
        error.add_note(f"with {row}")
        raise


def _values(factors: Sequence[Sequence[Any]], row: tuple[int, ...]) -> Row:
    return tuple(factor[number] for factor, number in zip(factors, row, strict=True))
