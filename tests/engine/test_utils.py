"""`sheer.utils`: one parameter's value, gradient and optimizer state, whole, at every stage, against a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sheer.testing
from sheer.errors import UsageError
from sheer.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from tests.engine.models import batches, odd
from tests.engine.oracle import Case, adamw, engine_run, plain_run, plainly, start, values
from tests.pairs import beginning, noted, pairs

PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
everywhere = pytest.mark.world_size(1, 2)
stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
ROWS = pairs((1, 2), (0, 1, 2, 3), tuple(PRECISIONS), (True, False))


def here(stage: int, precision: str = "fp32", **fields) -> Case:
    world, rank = sheer.testing.world_size(), sheer.testing.rank()
    return Case(stage=stage, world=world, rank=rank, extra=PRECISIONS[precision], **fields)


def distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative to the size of the whole."""
    assert mine.shape == theirs.shape
    return 0.0 if theirs.numel() == 0 else float((mine - theirs).norm() / theirs.norm())


@everywhere
def test_reads_values_gradients_and_state(world_size: int) -> None:
    for stage, precision, _ in beginning(world_size, ROWS):
        with noted(stage, precision):
            reads_values_gradients_and_state(stage, precision)


def reads_values_gradients_and_state(stage: int, precision: str) -> None:
    case = here(stage, precision)
    model, reference = odd(), odd()
    start_values = {fqn: p.detach().clone() for fqn, p in reference.named_parameters()}
    data = batches(3, size=case.global_batch)
    optimizer = adamw(reference)
    engine = start(model, case)
    for fqn, param in model.named_parameters():
        if param.requires_grad:  # the very fp32 bits the user gave
            assert torch.equal(safe_get_full_fp32_param(param), start_values[fqn]), fqn
            assert safe_get_full_grad(param) is None
            assert safe_get_full_optimizer_state(param, "exp_avg") is None
    engine_run(engine, case, data[:2])
    plain_run(reference, case, data[:2], optimizer=optimizer)
    engine.backward(plainly(engine, case.micro_batches(data[2])[0][case.rank], case.rank, 0))
    for tokens in case.micro_batches(data[2])[0]:
        (reference(tokens) / case.world).backward()
    near = {"fp32": 1e-4, "bf16": 0.06, "fp16": 0.01}[precision]  # 8 and 11 bits, and a sum that cancels (gain)
    shown = values(model)
    for (fqn, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if not mine.requires_grad:
            assert safe_get_full_fp32_param(mine) is None
            continue
        value = safe_get_full_fp32_param(mine)
        assert value.dtype is torch.float32
        assert torch.equal(value.to(mine.dtype), shown[fqn]), fqn
        gradient, moment = safe_get_full_grad(mine), safe_get_full_optimizer_state(mine, "exp_avg")
        assert (gradient is None) == (theirs.grad is None), fqn
        assert (moment is None) == (theirs not in optimizer.state or not theirs.numel()), fqn
        if gradient is not None:
            assert distance(value, theirs.detach()) < near, fqn
            assert distance(gradient, theirs.grad) < near, fqn
            assert distance(moment, optimizer.state[theirs]["exp_avg"]) < near, fqn
            assert safe_get_full_optimizer_state(mine, "step").item() == 2.0
    engine.step()


@everywhere
def test_looking_changes_nothing(world_size: int, tmp_path) -> None:
    for stage, precision, _ in beginning(world_size, ROWS):
        with noted(stage, precision):
            looking_changes_nothing(stage, precision, tmp_path / f"{stage} {precision}")


def looking_changes_nothing(stage: int, precision: str, tmp_path: Path) -> None:
    case = here(stage, precision, accumulation=2)
    data = batches(2, size=case.global_batch)
    states = []
    for looks in (False, True):
        model = odd()
        engine = start(model, case)
        for batch in data:
            for ranks in case.micro_batches(batch):
                engine.backward(engine(ranks[case.rank]))
                engine.step()
            if looks:
                for param in model.parameters():
                    safe_get_full_fp32_param(param)
                    assert safe_get_full_grad(param) is None
                    safe_get_full_optimizer_state(param, "exp_avg")
        engine.save_checkpoint(tmp_path / f"{looks}")  # refused if a look left gradients behind
        states.append(values(model))
        engine.destroy()
    for fqn, value in states[0].items():
        assert torch.equal(value, states[1][fqn]), fqn


@everywhere
def test_writes_values_and_state_exactly(world_size: int) -> None:
    for stage, precision, _ in beginning(world_size, ROWS):
        with noted(stage, precision):
            writes_values_and_state_exactly(stage, precision)


def writes_values_and_state_exactly(stage: int, precision: str) -> None:
    case = here(stage, precision)
    model = odd()
    engine = start(model, case)
    engine_run(engine, case, batches(1, size=case.global_batch))
    weight = model.blocks[1].up.weight
    neighbour = safe_get_full_fp32_param(model.blocks[1].up.bias)
    value, moment = torch.randn(weight.shape), torch.randn(weight.shape)
    safe_set_full_fp32_param(weight, value)
    safe_set_full_optimizer_state(weight, moment, "exp_avg")
    assert torch.equal(safe_get_full_fp32_param(weight), value)
    assert torch.equal(values(model)["blocks.1.up.weight"], value.to(weight.dtype))
    assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), moment)
    assert torch.equal(safe_get_full_fp32_param(model.blocks[1].up.bias), neighbour)
    engine_run(engine, case, batches(1, size=case.global_batch, seed=2))
    assert not torch.equal(safe_get_full_fp32_param(weight), value)


@everywhere
def test_a_written_gradient_is_the_one_applied(world_size: int) -> None:
    for stage, precision, after_backward in beginning(world_size, ROWS):
        with noted(stage, precision, after_backward):
            a_written_gradient_is_the_one_applied(stage, precision, after_backward=after_backward)


def a_written_gradient_is_the_one_applied(stage: int, precision: str, *, after_backward: bool) -> None:
    case = here(stage, precision)
    model = odd()
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    engine = start(model, case, **sgd)
    weight = model.blocks[1].up.weight
    before = safe_get_full_fp32_param(weight)
    if after_backward:
        engine.backward(engine(batches(1, size=case.micro)[0]))
    gradient = torch.randint(-8, 8, weight.shape).float() / 8  # exact in every dtype
    safe_set_full_grad(weight, gradient)
    assert torch.equal(safe_get_full_grad(weight), gradient)
    assert engine.step().skipped is False
    assert torch.equal(safe_get_full_fp32_param(weight), before - 0.5 * gradient)


@everywhere
def test_refuses_what_it_cannot_do() -> None:
    case = here(1)
    model = odd()
    engine = start(model, case)
    weight = model.blocks[0].up.weight
    engine_run(engine, case, batches(1, size=case.global_batch))
    for wrong in (lambda v: safe_set_full_fp32_param(weight, v), lambda v: safe_set_full_grad(weight, v)):
        with pytest.raises(UsageError, match=r"blocks\.0\.up\.weight.*\(24, 12\).*\(3,\)"):
            wrong(torch.zeros(3))
    engine.zero_grad()
    with pytest.raises(UsageError, match=r"exp_avgg.*Did you mean 'exp_avg'"):
        safe_get_full_optimizer_state(weight, "exp_avgg")
    with pytest.raises(UsageError, match=r"'step' is not a per-element optimizer state.*exp_avg"):
        safe_set_full_optimizer_state(weight, torch.zeros(()), "step")


def test_unmanaged_tensors() -> None:
    param = nn.Parameter(torch.ones(2))
    assert safe_get_full_fp32_param(param) is None
    assert safe_get_full_grad(param) is None
    assert safe_get_full_optimizer_state(param, "exp_avg") is None
    with pytest.raises(UsageError, match=r"shape \(2,\) is no parameter that a living engine trains"):
        safe_set_full_fp32_param(param, torch.zeros(2))
    model = odd()
    engine = start(model, Case())
    engine.destroy()
    assert safe_get_full_fp32_param(model.embed.weight) is None


@everywhere
@stages
def test_the_parts_of_all_ranks_are_the_whole(stage: int) -> None:
    case = here(stage, "bf16")
    model = odd()
    engine = start(model, case)
    data = batches(3, size=case.global_batch)

    def together(part: torch.Tensor | None) -> torch.Tensor:
        parts = engine.axis.gather_objects(part)
        return parts[0] if stage == 0 else torch.cat([one for one in parts if one is not None])

    engine_run(engine, case, data[:1])
    engine.backward(engine(case.micro_batches(data[1])[0][case.rank]))
    for param in (model.blocks[1].up.weight, model.embed.weight, model.gain):
        for full, local in (
            (safe_get_full_fp32_param(param), safe_get_local_fp32_param(param)),
            (safe_get_full_grad(param), safe_get_local_grad(param)),
            (safe_get_full_optimizer_state(param, "exp_avg"), safe_get_local_optimizer_state(param, "exp_avg")),
        ):
            assert torch.equal(together(local), full.flatten())
        safe_set_local_fp32_param(param, safe_get_local_fp32_param(param) + 0.125)
        safe_set_local_grad(param, safe_get_local_grad(param) * 2)
        moment = safe_get_local_optimizer_state(param, "exp_avg")
        if moment is not None:
            safe_set_local_optimizer_state(param, moment * 3, "exp_avg")
        assert torch.equal(together(safe_get_local_fp32_param(param)), safe_get_full_fp32_param(param).flatten())
        assert torch.equal(values(model)["gain"], safe_get_full_fp32_param(model.gain).bfloat16())
    with pytest.raises(UsageError, match=r"this rank has [0-9]+ elements of 'blocks\.1\.up\.weight'"):
        safe_set_local_fp32_param(model.blocks[1].up.weight, torch.zeros(1000))
    engine.step()
    assert safe_get_local_fp32_param(nn.Parameter(torch.zeros(2))) is None
