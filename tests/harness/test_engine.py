"""The engine under the harnesses: right where collectives are late, and without host syncs in a steady step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sheer
from sheer.comm import Ticket
from sheer.testing import rank
from tests.engine.oracle import values
from tests.harness.host_sync import no_host_sync
from tests.harness.late_work import LeaseViolation, late_collectives

STEPS = 3
MICRO = 2  # samples per rank and micro-batch


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def samples(micro_batches: int, world: int) -> torch.Tensor:
    """[micro-batch, rank, sample, feature]"""
    return torch.randn(micro_batches, world, MICRO, 8, generator=torch.Generator().manual_seed(1))


def start(module: nn.Module, *, stage: int, accumulation: int = 1, **more):
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
    }
    return sheer.initialize(model=module, config=config | more)[0]


def micro_step(engine, x: torch.Tensor) -> None:
    engine.backward(engine(x).square().mean())
    engine.step()


def train(engine, data: torch.Tensor) -> None:
    """Nobody looks at a result in between, so that everything which may stay in flight does."""
    for ranks in data:
        micro_step(engine, ranks[rank()])


def plain(data: torch.Tensor, *, accumulation: int) -> nn.Module:
    module = mlp()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for batch in data.split(accumulation):
        module(batch.flatten(0, 2)).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return module


@pytest.mark.world_size(2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_right_where_collectives_are_late(world_size, stage, accumulation):
    data = samples(STEPS * accumulation, world_size)
    module = mlp()
    with late_collectives() as late:
        engine = start(module, stage=stage, accumulation=accumulation)
        train(engine, data)
        state = values(module)  # the user's own module, right after the last step
        engine.destroy()
    torch.testing.assert_close(state, plain(data, accumulation=accumulation).state_dict(), rtol=1e-5, atol=1e-6)
    logs = [None] * world_size
    dist.all_gather_object(logs, [(entry.op, entry.numel, str(entry.dtype), entry.ranks) for entry in late.log])
    assert logs[0] == logs[1]
    assert len(logs[0]) >= STEPS


@pytest.mark.world_size(2)
def test_an_engine_that_forgets_to_wait_is_caught(world_size, monkeypatch):
    """The harness reaches the engine: without this the test above could be idle."""
    monkeypatch.setattr(Ticket, "wait", lambda self: None)

    def run():
        with late_collectives():
            train(start(mlp(), stage=0), samples(1, world_size))

    with pytest.raises(LeaseViolation, match="never waited on"):
        run()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_steady_step_does_not_wait_for_the_device(world_size, stage, precision):
    options = {"loss_scale": 128} if precision == "fp16" else {}  # an overflow is no steady step
    more = {} if precision == "fp32" else {precision: {"enabled": True, **options}}
    engine = start(mlp(), stage=stage, accumulation=2, **more)
    data = samples(6, world_size).to(next(engine.module.parameters()).dtype)
    train(engine, data[:2])  # the first step may build things
    steps = 2
    # fp16 decides on the host whether the schedule moves: one number a step, as torch's own scaler does.
    with no_host_sync(reads=steps if precision == "fp16" else 0):
        train(engine, data[2:])
    assert engine.global_steps == 1 + steps
    engine.destroy()
