"""The check of equal work tells unequal work from equal, on every model that is raced."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from benchmarks.contenders import CONTENDERS, RAW, Job
from benchmarks.equal import TOLERANCE, difference, expected
from benchmarks.workloads import data, make

MODELS = pytest.mark.parametrize("workload", ["small", "blocks", "mlp", "conv"])


@lru_cache
def right(workload: str) -> list[list[float]]:
    return expected(workload, ranks=2)


def worst(found: list[list[float]], wanted: list[list[float]]) -> float:
    return max(difference(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


@MODELS
def test_who_does_not_clip_is_told(workload: str) -> None:
    assert worst(expected(workload, ranks=2, clip=1e9), right(workload)) > 2 * TOLERANCE


@MODELS
def test_who_does_not_average_over_ranks_is_told(workload: str) -> None:
    alone = [expected(workload, ranks=2, alone=rank)[0] for rank in range(2)]
    assert worst(alone, right(workload)) > 2 * TOLERANCE


@MODELS
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_raw_loop_and_ours_alone_do_equal_work(workload: str, accumulation: int) -> None:
    """On one rank no process group is needed; with more `make bench` checks them itself."""
    wanted = expected(workload, ranks=1, accumulation=accumulation)[0]
    for name in (RAW, "Sheer stage 0", "Sheer stage 1", "Sheer stage 2"):
        made = make(workload)
        trainer = CONTENDERS[name].build(Job(made.model, False, accumulation))
        source = data(made, 0)
        found = [float(trainer.step(source(accumulation))) for _ in wanted]
        trainer.close()
        assert difference(found, wanted) <= TOLERANCE, name


def test_no_numbers_are_equal_to_none() -> None:
    with pytest.raises(AssertionError):
        difference([1.0], [1.0, 2.0])
    assert not difference([float("nan")], [1.0]) <= TOLERANCE


def test_the_model_is_the_same_for_everyone() -> None:
    first, second = make("small"), make("small")
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(data(first, 1)(1)[0], data(second, 1)(1)[0], strict=True):
        assert torch.equal(a, b)
