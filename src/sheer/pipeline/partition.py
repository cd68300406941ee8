"""Which layers each virtual stage holds: pure, and the same on every rank that passes the same numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from sheer.errors import UsageError, did_you_mean

METHODS = ("uniform", "parameters", "time", "type:REGEX")
PLACEMENTS = ("loop", "v")


class Cost(NamedTuple):
    """What a partition minimises, in this order; sums over parts are compared as tuples."""

    spread: float
    """Sum of squared weights of the parts, none of which is above the smallest possible maximum."""
    unevenness: int
    """Sum of squared numbers of layers, so that layers without weight spread too."""


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Boundaries of `parts` stretches of `weights` whose heaviest is as light as can be.

    Among those the weights are spread most evenly, then the numbers of layers; then later boundaries come late, so
    that what is left over is in front. Stretches may be empty only where there are fewer weights than parts.

    Returns:
        `parts + 1` indices from 0 to `len(weights)`, never decreasing.
    """
    count = len(weights)
    if count <= parts:
        return [min(i, count) for i in range(parts + 1)]
    sums = [0.0, *accumulate(float(w) for w in weights)]
    slack = 1e-9 * (sums[-1] or 1.0)
    limit = _lightest_maximum(sums, parts) + slack
    # best[i]: the cheapest way to cut the first i weights into the parts so far, and where its last part begins
    best: list[Cost | None] = [Cost(0.0, 0)] + [None] * count
    begins: list[list[int]] = []
    for _ in range(parts):
        best, begin = _one_more_part(best, sums, limit)
        begins.append(begin)
    cuts = [count]
    for begin in reversed(begins):
        cuts.append(begin[cuts[-1]])
    return cuts[::-1]


def _one_more_part(best: list[Cost | None], sums: Sequence[float], limit: float) -> tuple[list[Cost | None], list[int]]:
    longer: list[Cost | None] = [None] * len(sums)
    begin = [0] * len(sums)
    for stop in range(1, len(sums)):
        for start in range(stop - 1, -1, -1):
            weight = sums[stop] - sums[start]
            if weight > limit:
                break
            before = best[start]
            if before is None:
                continue
            cost = Cost(before.spread + weight * weight, before.unevenness + (stop - start) ** 2)
            known = longer[stop]
            if known is None or cost < known:
                longer[stop], begin[stop] = cost, start
    return longer, begin


def _lightest_maximum(sums: Sequence[float], parts: int) -> float:
    """The least weight that the heaviest of `parts` non-empty stretches can have."""
    count = len(sums) - 1
    reach = [sums[i] for i in range(count + 1)]  # with one part: all of the first i
    for made in range(1, parts):
        longer = [float("inf")] * (count + 1)
        split = made
        for stop in range(made + 1, count + 1):
            # the best last cut moves right as stop does
            while split + 1 < stop and max(reach[split + 1], sums[stop] - sums[split + 1]) <= max(
                reach[split], sums[stop] - sums[split]
            ):
                split += 1
            longer[stop] = max(reach[split], sums[stop] - sums[split])
        reach = longer
    return reach[count]


def type_weights(kinds: Sequence[str], pattern: str) -> list[int]:
    """1 for each layer whose class name matches the regular expression `pattern` in any case, else 0."""
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UsageError(f"partition_method 'type:{pattern}': no regular expression: {error}") from None
    weights = [int(compiled.search(kind) is not None) for kind in kinds]
    if not any(weights):
        names = list(dict.fromkeys(kinds))
        raise UsageError(
            f"partition_method 'type:{pattern}' matches no layer; their classes are {', '.join(names)}."
            f"{did_you_mean(pattern, names)}"
        )
    return weights


def check_method(method: str) -> None:
    """Refuse a partition method that does not exist."""
    if method.lower() in METHODS[:3] or method.lower().startswith("type:"):
        return
    raise UsageError(
        f"partition_method is {method!r}; allowed are {', '.join(map(repr, METHODS))}, or boundaries=[0, ..., n]."
        f"{did_you_mean(method, METHODS)}"
    )


def check_boundaries(boundaries: Sequence[int], *, layers: int, parts: int) -> list[int]:
    """`boundaries` as a list, if they cut `layers` layers into `parts` parts (some may be empty)."""
    given = list(boundaries)
    ordered = all(a <= b for a, b in pairwise(given))
    if len(given) != parts + 1 or given[:1] != [0] or given[-1:] != [layers] or not ordered:
        raise UsageError(
            f"boundaries {given} do not cut {layers} layers into {parts} parts (stages x chunks): give {parts + 1}"
            f" indices that begin with 0, end with {layers} and never decrease"
        )
    return given


def place(placement: str | Sequence[int], *, stages: int, chunks: int) -> tuple[int, ...]:
    """The stage that holds each of `stages * chunks` virtual stages.

    `"loop"` deals them out in turn (0 1 2 0 1 2); `"v"` turns back at the end (0 1 2 2 1 0), so that the first and
    the last are on one stage; or the stages themselves, each `chunks` times.
    """
    if isinstance(placement, str):
        if placement not in PLACEMENTS:
            raise UsageError(f"placement is {placement!r}; allowed are 'loop', 'v', or a list of stages")
        there = range(stages)
        rounds = [there if placement == "loop" or c % 2 == 0 else reversed(there) for c in range(chunks)]
        return tuple(stage for one in rounds for stage in one)
    given = tuple(placement)
    if sorted(given) != sorted(list(range(stages)) * chunks):
        raise UsageError(
            f"placement {list(given)} must name each of the stages 0 .. {stages - 1} exactly {chunks} times (chunks)"
        )
    return given
