"""A model with every oddity that a checkpoint meets, and runs of it in worlds of several sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

import sheer
import sheer.testing
from tests.engine.models import Odd, batches
from tests.engine.oracle import Case, engine_run

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}},
}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALL = 6
"""Samples per step, in worlds of 1, 2 and 3."""


class Everything(Odd):
    """Odd names, a buffer that moves, and parameters that stay in fp32 (a batch norm's) besides what `Odd` has: tied,
    frozen, zero-element, scalar, never used and sometimes used parameters, buffers that are saved and not."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict({"a name": nn.Linear(12, 12), "ünï-code/slash": nn.Linear(12, 12)})
        self.register_buffer("moving", torch.zeros(12))
        self.island = nn.BatchNorm1d(12).eval()  # by its statistics, so that a loss does not depend on its neighbours

    def forward(self, tokens: torch.Tensor, *, branch: bool = False) -> torch.Tensor:
        with torch.no_grad():
            self.moving.mul_(0.9).add_(self.embed.weight.float().mean(0), alpha=0.1)
        extra = sum(linear(self.embed(tokens)).square().mean() for linear in self.named.values())
        island = self.island(self.embed(tokens).float().flatten(0, 1)).square().mean()
        return super().forward(tokens, branch=branch) + 0.01 * (extra + island)


def everything(seed: int) -> Everything:
    torch.manual_seed(seed)
    return Everything()


def here(stage: int = 0, **fields: Any) -> Case:
    return Case(stage=stage, world=sheer.testing.world_size(), rank=sheer.testing.rank(), **fields)


def in_world(world: int, stage: int, precision: str = "fp32", **fields: Any) -> Case:
    fields.setdefault("micro", ALL // world)
    return Case(stage=stage, world=world, rank=sheer.testing.rank(), extra=PRECISIONS[precision], **fields)


def grouped(module: nn.Module, cls: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """Two groups of different settings and an empty one."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    return cls([{"params": matrices, "lr": 3e-3}, {"params": []}, {"params": others, "lr": 1e-3}], **options)


def build(seed: int, case: Case, *, cls: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    model = everything(seed)
    return sheer.initialize(model=model, optimizer=grouped(model, cls, **options), config=case.config())[0]


def branching(module: nn.Module, tokens: torch.Tensor, rank: int, number: int, *, step: int) -> torch.Tensor:
    return module(tokens, branch=step == 1)


def train(engine: Any, case: Case, steps: range) -> list[Any]:
    """Steps of one endless run: the same data at every world size; one of them uses parameters that others do not."""
    results = []
    for step in steps:
        data = batches(1, size=case.global_batch, seed=100 + step)
        results += engine_run(engine, case, data, call=partial(branching, step=step))
    return results
