"""Training through the engine equals a plain single-process loop, at every stage, world and accumulation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sheer.testing
from tests.engine.models import Odd, batches, odd
from tests.engine.oracle import Case, Step, adamw, assert_same_model, engine_run, plain_run, start, values
from tests.pairs import beginning, noted, pairs

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def assert_same_steps(ours: list[Step], expected: list[Step]) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def here(**fields) -> Case:
    return Case(world=sheer.testing.world_size(), rank=sheer.testing.rank(), **fields)


ROWS = pairs((1, 2, 3), (0, 1, 2, 3), (1, 3), (0.0, 0.5))


@pytest.mark.world_size(1, 2, 3)
def test_equals_plain(world_size: int) -> None:
    for stage, accumulation, clip in beginning(world_size, ROWS):
        case = here(stage=stage, accumulation=accumulation, clip=clip)
        model, reference = odd(seed=case.rank), odd(seed=0)  # ranks start differently: rank 0's weights must win
        data = batches(4, size=case.global_batch)
        with noted(stage, accumulation, clip):
            engine = start(model, case)
            ours = engine_run(engine, case, data)
            assert_same_steps(ours, plain_run(reference, case, data, optimizer=adamw(reference)))
            reference.seen.copy_(model.seen)  # counted per rank
            assert_same_model(model, reference, **TOLERANCE)
        engine.destroy()


def branching(module: nn.Module, tokens: torch.Tensor, rank: int, number: int) -> torch.Tensor:
    return module(tokens, branch=rank == 1 and number == 0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_parameters_used_on_one_rank_only(stage: int, accumulation: int) -> None:
    case = here(stage=stage, accumulation=accumulation, clip=0.5)
    model, reference = odd(), odd()
    data = batches(4, size=case.global_batch)
    ours = engine_run(start(model, case), case, data, call=branching)
    assert_same_steps(ours, plain_run(reference, case, data, optimizer=adamw(reference), call=branching))
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, **TOLERANCE)


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_used_in_some_steps_keep_value_and_moments_in_others(stage: int) -> None:
    """Adam's bias correction and decay must count each parameter's own steps."""
    case = here(stage=stage)
    model, reference = odd(), odd()
    ours_optimizer = start(model, case)
    optimizer = adamw(reference)
    for step, batch in enumerate(batches(5, size=case.global_batch)):

        def call(module, tokens, rank, number, step=step):
            return module(tokens, branch=step in (1, 2, 4))

        engine_run(ours_optimizer, case, [batch], call=call)
        plain_run(reference, case, [batch], optimizer=optimizer, call=call)
        reference.seen.copy_(model.seen)
        assert_same_model(model, reference, **TOLERANCE)
    assert torch.equal(values(model)["never"], torch.full((7,), 3.0))


def test_one_rank_without_a_launcher_is_bitwise_equal() -> None:
    """With foreach kernels: fused ones round the last few elements of a tensor differently, wherever it ends."""
    case = Case(accumulation=2, extra={"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "foreach": True}}})
    model, reference = odd(), odd()
    data = batches(5, size=case.global_batch)
    engine_run(start(model, case), case, data)
    plain_run(reference, case, data, optimizer=torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=True))
    assert_same_model(model, reference, rtol=0, atol=0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("stages", "accumulation"), [((0, 1, 2), 1), ((0, 1), 2)])
def test_stages_are_bitwise_equal(stages: tuple[int, ...], accumulation: int) -> None:
    """Where they add in the same order: stage 2 sums over ranks before micro-batches, the others after."""
    states = []
    for stage in stages:
        case = here(stage=stage, accumulation=accumulation, clip=0.5)
        model = odd()
        engine = start(model, case)
        engine_run(engine, case, batches(4, size=case.global_batch))
        states.append(values(model))
        engine.destroy()
    for other in states[1:]:
        for key, value in states[0].items():
            assert torch.equal(value, other[key]), key


@pytest.mark.world_size(2)
def test_stage_3_is_bitwise_equal_to_2() -> None:
    """Its buckets are others, which a norm and the ends of fused kernels show: hence foreach, and no clipping."""
    plain = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "foreach": True}}}
    states = []
    for stage in (2, 3):
        case = here(stage=stage, accumulation=2, extra=plain)
        model = odd()
        engine_run(start(model, case), case, batches(4, size=case.global_batch))
        states.append(values(model))
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_groups_keep_their_options_and_may_be_empty(stage: int) -> None:
    case = here(stage=stage, clip=0.3)
    model, reference = odd(), odd()

    def grouped(module: Odd) -> torch.optim.Optimizer:
        decayed = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "lr": 3e-3}, {"params": []}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

    data = batches(4, size=case.global_batch)
    optimizer = grouped(model)
    options = list(optimizer.param_groups)
    engine = sheer.initialize(model=model, optimizer=optimizer, config=case.config())[0]
    engine_run(engine, case, data)
    plain_run(reference, case, data, optimizer=grouped(reference))
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, **TOLERANCE)
    assert all(mine is theirs for mine, theirs in zip(engine.optimizer.param_groups, options, strict=True))
    assert [group["lr"] for group in engine.optimizer.param_groups] == [3e-3, 1e-2, 1e-2]
    assert engine.optimizer.param_groups[1]["params"] == []


@pytest.mark.world_size(4)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_smaller_than_the_world(stage: int) -> None:
    case = here(stage=stage, micro=1)
    model, reference = nn.Linear(3, 1), nn.Linear(3, 1)
    reference.load_state_dict(model.state_dict())
    for param in [*model.parameters(), *reference.parameters()]:
        nn.init.constant_(param, 0.25)

    def call(module, tokens, rank, number):
        return module(tokens.float()[:, :3]).square().mean()

    data = batches(3, size=case.global_batch)
    engine_run(start(model, case), case, data, call=call)
    plain_run(reference, case, data, optimizer=adamw(reference), call=call)
    assert_same_model(model, reference, **TOLERANCE)
