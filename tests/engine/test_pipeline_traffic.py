"""What the ranks of one stage say to each other in a step, and how much of the stage is whole at a time."""

from __future__ import annotations

import re
from collections import Counter
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sheer
from sheer import LayerSpec
from sheer.zero import Phase
from tests.engine.models import Block, batches
from tests.engine.stages import VOCABULARY, WIDTH, assert_trains_as_plain, case_of, staged, train, whole

MICRO_BATCHES = 4


def layers() -> list[Any]:
    """Nothing tied: every parameter is one layer's."""
    blocks = [LayerSpec(Block, WIDTH) for _ in range(8)]
    return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def start(zero: int, schedule: str, **more: Any) -> Any:
    case = case_of(2, stage=zero, accumulation=MICRO_BATCHES, extra={"zero_optimization": {"stage": zero}})
    module = staged(2, layers=layers(), boundaries=None if more else [0, 5, 10], **more)
    engine = sheer.initialize(model=module, config=case.config(pipeline={"schedule": schedule}))[0]
    return engine, case


def log_of(engine: Any, case: Any, *, seed: int) -> list[Any]:
    engine.traffic.log = log = []
    train(engine, case, batches(1, size=case.global_batch, seed=seed))
    engine.traffic.log = None
    return log


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("schedule", "more"),
    [("1f1b", {}), ("zero-bubble", {}), ("interleaved", {"chunks": 2}), ("zb-v", {"chunks": 2, "placement": "v"})],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("zero", [0, 2])
def test_a_chunk_is_reduced_with_its_own_backward(schedule: str, more: dict[str, Any], zero: int) -> None:
    """Stage 2: a bucket once for each micro-batch; stage 0: once a step. Halved backwards and chunks add nothing."""
    engine, case = start(zero, schedule, **more)
    for seed in range(2):
        log = log_of(engine, case, seed=seed)
        counts = Counter(entry.what for entry in log if entry.what.startswith("reduction"))
        assert len(counts) == len(engine.layout.buckets) == len(more.get("chunks", 1) * [0])
        assert set(counts.values()) == {MICRO_BATCHES if zero else 1}


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("schedule", "more"),
    [("1f1b", {}), ("zero-bubble", {}), ("interleaved", {"chunks": 2})],
    ids=["1f1b", "zb", "chunks"],
)
def test_few_layers_of_a_stage_are_whole_at_a_time(schedule: str, more: dict[str, Any]) -> None:
    """Two, however many micro-batches are under way; each is gathered once for each pass that it takes part in, or
    less: the layer that a pass ends with and the next one begins with stays. Gradients of weights come in W."""
    engine, case = start(3, schedule, **more)
    vault = engine._runtime.gathering.vault
    sizes = Counter()
    for bucket in engine.layout.buckets:
        sizes[bucket.key.unit] += bucket.numel * 4
    assert "" not in sizes
    assert len(sizes) == 5
    phases: list[Phase] = []
    for param in engine.module.parameters():
        param.register_post_accumulate_grad_hook(lambda _: phases.append(engine._runtime.gathering._passes[1].phase))
    for seed in range(2):
        vault.peak = vault.live
        log = log_of(engine, case, seed=seed)
        assert vault.live == 0
        assert vault.peak <= sum(sorted(sizes.values())[-2:])
        gathers = Counter(entry.what for entry in log if entry.op == "all_gather")
        passes = 3 if schedule == "zero-bubble" else 2
        assert all(count <= passes * MICRO_BATCHES for count in gathers.values())
        reductions = Counter(entry.what for entry in log if entry.op == "reduce_scatter")
        assert set(reductions.values()) == {MICRO_BATCHES}
        assert {*phases} == {Phase.WEIGHTS if schedule == "zero-bubble" else Phase.BACKWARD}


@pytest.mark.world_size(4)
def test_the_next_pass_begins_to_arrive_when_one_ends() -> None:
    """The last layer of a forward stays for its backward; where another forward follows, its first layer comes."""
    engine, case = start(3, "1f1b")
    log_of(engine, case, seed=0)
    log = log_of(engine, case, seed=1)
    names = [str(layer) for layer in (range(5) if engine.is_first_stage() else range(5, 10))]
    found = [re.search(r"gather of bucket \d+ \((\d+):", entry.what) for entry in log]
    gathered = [name for name, _ in groupby(one[1] for one in found if one)]
    there, back = names, names[::-1]
    if engine.is_first_stage():  # F F B F B F B B
        assert gathered == [*there, *there, *back[1:], *there[1:], *back[1:], *there[1:], *back[1:], *back]
    else:  # F B F B F B F B
        assert gathered == [*there, *back[1:], *([*there[1:], *back[1:]] * 3)]


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("holder", "reader", "zero"),
    # Stages 0 and 1 reduce at the same moments.
    [(1, 5, 0), (1, 5, 2), (1, 5, 3), (5, 1, 1), (5, 1, 2), (5, 1, 3)],
)
def test_a_function_may_read_what_another_chunk_holds(holder: int, reader: int, zero: int) -> None:
    """The gradient comes with a backward that reduces other buckets, and is reduced with its own, or after all."""

    def build() -> list[Any]:
        torch.manual_seed(5)
        shared = nn.Linear(WIDTH, WIDTH)
        made = [*layers()[:8], layers()[-1]]
        made[holder], made[reader] = shared, lambda x: x + F.linear(x, shared.weight)
        return made

    case = case_of(2, stage=zero, accumulation=2)
    module = staged(2, layers=build(), chunks=2, boundaries=[0, 2, 4, 7, 9])
    engine = sheer.initialize(model=module, config=case.config())[0]
    assert_trains_as_plain(engine, case, module=whole(layers=build()))
