"""The oracle: a plain single-process PyTorch loop over the same global batches, and the engine's run beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import sheer


class Step(NamedTuple):
    loss: float
    norm: float


class Case(NamedTuple):
    """One way to train: what differs between runs that must be equal."""

    stage: int = 0
    world: int = 1
    rank: int = 0
    accumulation: int = 1
    micro: int = 2
    clip: float = 0.0
    extra: dict[str, Any] = {}
    offload: dict[str, Any] = {}

    def config(self, **more: Any) -> dict[str, Any]:
        config = {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 600, **self.offload},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "gradient_clipping": self.clip,
        }
        return {**config, **self.extra, **more}

    @property
    def global_batch(self) -> int:
        return self.world * self.accumulation * self.micro

    def micro_batches(self, batch: torch.Tensor) -> list[list[torch.Tensor]]:
        """[micro-batch][rank] of a global batch, as the engine's loader deals them."""
        parts = batch.split(self.micro)
        return [list(parts[k * self.world : (k + 1) * self.world]) for k in range(self.accumulation)]


Call = Callable[[nn.Module, torch.Tensor, int, int], torch.Tensor]
"""(module, tokens, rank, micro-batch number) -> loss; how the model is called on a rank."""


def plainly(module: nn.Module, tokens: torch.Tensor, rank: int, number: int) -> torch.Tensor:
    return module(tokens)


def plain_run(
    module: nn.Module,
    case: Case,
    data: Sequence[torch.Tensor],
    *,
    optimizer: torch.optim.Optimizer,
    call: Call = plainly,
    scheduler: Any = None,
) -> list[Step]:
    """Train `module` in this process alone."""
    steps = []
    count = case.world * case.accumulation
    for batch in data:
        losses = []
        for number, ranks in enumerate(case.micro_batches(batch)):
            for rank, tokens in enumerate(ranks):
                loss = call(module, tokens, rank, number)
                (loss / count).backward()
                losses.append(loss.item())
        params = [p for p in module.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(params, case.clip if case.clip else float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        steps.append(Step(sum(losses) / len(losses), float(norm)))
    return steps


def engine_run(engine: Any, case: Case, data: Sequence[torch.Tensor], *, call: Call = plainly) -> list[Step]:
    """Train this rank's share through `engine`."""
    steps = []
    for batch in data:
        for number, ranks in enumerate(case.micro_batches(batch)):
            loss = call(engine, ranks[case.rank], case.rank, number)
            engine.backward(loss)
            result = engine.step()
        assert result is not None
        steps.append(Step(result.loss, result.grad_norm))
    return steps


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """What the config of a `Case` names."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def start(module: nn.Module, case: Case, **more: Any) -> Any:
    """An engine for `case`."""
    return sheer.initialize(model=module, config=case.config(**more))[0]


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all that `module` holds. Collective where it is sharded."""
    with sheer.zero.GatheredParameters(module):
        return copy.deepcopy(module.state_dict())


def assert_same_model(mine: nn.Module, theirs: nn.Module, **tolerance: float) -> None:
    """Same keys in the same order, same values. Collective where `mine` is sharded."""
    ours, expected = values(mine), theirs.state_dict()
    assert list(ours) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, msg=lambda m, key=key: f"{key}: {m}", **tolerance)
