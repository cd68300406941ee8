"""Bytes are measured, not computed: the walk and the allocator's peak see what is there. The ZeRO formula is right."""

from __future__ import annotations

import pytest
import torch
from benchmarks.live import live, peak_above_rest
from benchmarks.memory import BF16, FP32
from benchmarks.replay import bare
from benchmarks.workloads import WORKLOADS, make

from sheer.comm import Traffic


def test_the_walk_counts_each_storage_once_and_idle_blocks_apart() -> None:
    before = live()
    owner = torch.zeros(1000)
    views = [owner[:10], owner.view(10, 100)]
    block = torch.zeros(500, dtype=torch.uint8)
    after = live()
    assert (after.held - before.held, after.idle - before.idle) == (4000, 500)
    assert len(views) + block.numel() == 502


def test_the_walk_finds_gradients() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000))
    before = live()
    parameter.sum().backward()
    parameter.grad = parameter.grad.clone()
    assert live().held - before.held == 4000


def test_the_peak_is_the_allocator_s() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        first = torch.empty(2**20)
        second = torch.empty(2**20)
        del first, second
        kept.append(torch.empty(2**18))

    assert peak_above_rest(step) == pytest.approx(8 * 2**20, rel=0.01)


def test_the_formula_is_the_paper_s() -> None:
    """Section 5 of arXiv 1910.02054: 16 bytes per parameter in mixed precision, and its stages."""
    assert [BF16.bytes.at(stage, 64) for stage in range(4)] == [16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64]
    assert [FP32.bytes.at(stage, 2) for stage in range(4)] == [16, 12, 10, 8]


@pytest.mark.world_size(2)
def test_a_step_s_collectives_can_be_replayed() -> None:
    sent = [Traffic(op, 1024, torch.float32, "test") for op in ("all_reduce", "reduce_scatter", "all_gather")]
    assert bare(sent, times=2) > 0


@pytest.mark.parametrize("workload", sorted(set(WORKLOADS) - {"gpt"}))
def test_every_model_gives_a_loss(workload: str) -> None:
    made = make(workload)
    assert made.model(*made.batch(torch.Generator().manual_seed(0))).ndim == 0
