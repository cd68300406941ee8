"""Parts of a checkpoint, other names, other settings: what is loaded, what stays, what is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sheer
import sheer.testing
from sheer import checkpoint
from sheer.errors import CheckpointError, UsageError
from sheer.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.engine.models import Odd, batches, odd
from tests.engine.oracle import Case, engine_run, start, values
from tests.engine.worlds import assert_same, contents, snapshot

everywhere = pytest.mark.world_size(1, 2)
FEW = {"checkpoint": {"timeout_seconds": 20}}


def case_of(stage: int, **extra: Any) -> Case:
    world, rank = sheer.testing.world_size(), sheer.testing.rank()
    return Case(stage=stage, world=world, rank=rank, extra={"bf16": {"enabled": True}, **FEW, **extra})


def train(engine: Any, case: Case, steps: range) -> list[Any]:
    return [engine_run(engine, case, batches(1, size=case.global_batch, seed=step))[0] for step in steps]


def moment(engine: Any) -> torch.Tensor | None:
    return safe_get_full_optimizer_state(engine.module.blocks[1].up.weight, "exp_avg")


class Renamed(nn.Module):
    """The same model inside another, under another name, with a head of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = odd(seed)
        self.body.layers = self.body.blocks
        del self.body.blocks
        self.extra = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body.embed(tokens)
        for block in self.body.layers:
            x = block(x)
        return self.body.head(x).square().mean() + self.extra.weight.square().sum()


@everywhere
@pytest.mark.parametrize("stage", [1, 3])
def test_parts_and_other_names(stage: int, tmp_path: Path) -> None:
    case = case_of(stage)
    first = start(odd(), case)
    train(first, case, range(2))
    first.save_checkpoint(tmp_path)
    stored = {key.name: tensor for key, tensor in contents(tmp_path / "global_step2").items() if key.kind == "param"}
    first.destroy()

    engine = start(odd(seed=4), case)
    train(engine, case, range(1))
    kept, before = values(engine.module), moment(engine)
    engine.load_checkpoint(tmp_path, include=["blocks.1.*", "head.*"], exclude="*.bias")
    now = values(engine.module)
    for name, value in now.items():
        taken = name in ("embed.weight", "head.weight") or (name.startswith("blocks.1.") and name.endswith("weight"))
        expected = stored["embed.weight" if name == "head.weight" else name] if taken else kept[name]
        assert torch.equal(value, expected.to(value.dtype)), name
    assert torch.equal(safe_get_full_fp32_param(engine.module.embed.weight), stored["embed.weight"])
    assert torch.equal(moment(engine), before), "a partial load leaves the optimizer alone"
    assert engine.global_steps == 1
    with pytest.raises(CheckpointError, match=r"no tensor of the checkpoint matches 'block\.1\.\*'"):
        engine.load_checkpoint(tmp_path, include="block.1.*")
    with pytest.raises(UsageError, match="custom_load_fn is given the whole checkpoint"):
        engine.load_checkpoint(tmp_path, include="blocks.*", custom_load_fn=print)
    train(engine, case, range(1))
    engine.destroy()

    other = start(Renamed(5), case)
    rename = {"": "body", "blocks": "body.layers"}
    unchanged = snapshot(other)
    with pytest.raises(CheckpointError, match=r"missing: param 'extra\.bias' \[3\] is wanted"):
        other.load_checkpoint(tmp_path, rename=rename)
    assert_same(snapshot(other), unchanged)
    other.load_checkpoint(tmp_path, rename=rename, load_module_strict=False)
    names = checkpoint.Names(rename=rename)
    for name, value in stored.items():
        got = values(other.module)[names.here(name)]
        assert torch.equal(got, value.to(got.dtype)), name
    state = contents(tmp_path / "global_step2")[checkpoint.Key("optim.exp_avg", "blocks.1.up.weight")]
    assert torch.equal(safe_get_full_optimizer_state(other.module.body.layers[1].up.weight, "exp_avg"), state)
    assert other.global_steps == 2
    train(other, case, range(1))
    other.destroy()


@everywhere
def test_the_optimizer_starts_afresh_and_settings_are_whose_is_said(tmp_path: Path, caplog) -> None:
    case = case_of(2)
    first = start(odd(), case)
    train(first, case, range(2))
    first.save_checkpoint(tmp_path)
    other = case_of(2, optimizer={"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.3}})
    engine = start(odd(seed=4), other)
    train(engine, other, range(1))
    apart = "group 0: lr 0.005 here, 0.01 in the checkpoint, group 0: weight_decay 0.3 here, 0.1 in the checkpoint"
    with caplog.at_level(logging.INFO, "sheer"):
        engine.load_checkpoint(tmp_path, load_hyperparameters=False)
        group = engine.optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (5e-3, 0.3)
        assert torch.equal(moment(engine), moment(first))
        assert case.rank or f"this run's hyper-parameters stay: {apart}" in caplog.text
        engine.load_checkpoint(tmp_path)
        assert (group["lr"], group["weight_decay"]) == (1e-2, 0.1)
        assert case.rank or f"the checkpoint's hyper-parameters replace this run's: {apart}" in caplog.text
    group["lr"] = 5e-3
    engine.load_checkpoint(tmp_path, reset_optimizer=True)
    assert moment(engine) is None
    assert group["lr"] == 5e-3
    assert engine.global_steps == 2
    # As a run whose optimizer has seen nothing.
    fresh = start(odd(seed=4), other)
    fresh.optimizer.param_groups[0].update(lr=5e-3, weight_decay=0.1)
    fresh.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert train(engine, other, range(2)) == train(fresh, other, range(2))
    assert_same(snapshot(engine), snapshot(fresh))


@everywhere
def test_a_strict_load_lists_all_that_does_not_fit_with_shapes(tmp_path: Path) -> None:
    case = case_of(1)
    first = start(odd(), case)
    first.save_checkpoint(tmp_path)
    model = odd(seed=1)
    model.sometime, model.gains = model.sometimes, model.gain
    del model.sometimes, model.gain
    model.never = nn.Parameter(torch.zeros(9))
    model.forward = lambda tokens: Odd.forward(model, tokens)
    engine = start(model, case)
    before = snapshot(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(tmp_path)
    for line in (
        "shape: param 'never' [7] in the checkpoint, [9] is wanted",
        "missing: param 'gains' [] is wanted, not in the checkpoint; nearest in the checkpoint: 'gain' []",
        "missing: param 'sometime.weight' [12, 12] is wanted, not in the checkpoint; nearest in the checkpoint: "
        "'sometimes.weight' [12, 12]",
        "unexpected: param 'gain' [] is in the checkpoint, not wanted; nearest wanted: 'gains' []",
    ):
        assert line.replace("'never' [7]", "'never' is [7]") in str(caught.value)
    assert_same(snapshot(engine), before)


def test_a_schedule_of_other_groups_is_refused(tmp_path: Path) -> None:
    def build(groups: int) -> Any:
        model = odd()
        params = list(model.parameters())
        cut = [params] if groups == 1 else [params[:3], params[3:]]
        optimizer = torch.optim.AdamW([{"params": part} for part in cut], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        config = {"train_batch_size": 2}
        return sheer.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]

    build(1).save_checkpoint(tmp_path)
    engine = build(2)
    before = snapshot(engine)
    with pytest.raises(CheckpointError, match=r"goes with 1 optimizer groups, this run's with 2.*load_lr_scheduler"):
        engine.load_checkpoint(tmp_path, reset_optimizer=True)
    assert_same(snapshot(engine), before)
    engine.load_checkpoint(tmp_path, reset_optimizer=True, load_lr_scheduler_states=False)
    train(engine, Case(), range(1))


@everywhere
@pytest.mark.parametrize("stages", [(1, 0), (0, 3), (3, 1)])
def test_a_folder_for_each_rank(stages: tuple[int, int], tmp_path: Path) -> None:
    """As nodes have; what a rank needs of the others is brought, and random states come with it."""
    local = {"checkpoint": {"use_node_local_storage": True}}
    case = case_of(stages[0], **local)
    folder = tmp_path / f"{case.rank}"
    first = start(odd(), case)
    train(first, case, range(2))
    first.save_checkpoint(folder)
    first.save_checkpoint(tmp_path / "beside" / f"{case.rank}", blocking=False)
    first.wait_for_checkpoint()
    shown = values(first.module)
    first.destroy()
    for place in (folder, tmp_path / "beside" / f"{case.rank}"):
        other = case_of(stages[1], **local)
        engine = start(odd(seed=4), other)
        torch.manual_seed(99)
        assert engine.load_checkpoint(place, tag="global_step2")[0] == str(place / "global_step2")
        assert_same(values(engine.module), shown)
        assert engine.global_steps == 2
        train(engine, other, range(1))
        engine.destroy()


@pytest.mark.world_size(2)
def test_arguments_that_differ_between_ranks_or_are_no_arguments(tmp_path: Path, caplog) -> None:
    case = case_of(1)
    engine = start(odd(), case)
    train(engine, case, range(1))
    with pytest.raises(UsageError, match=r"client_state is a dict .* not a list"):
        engine.save_checkpoint(tmp_path, client_state=[1])
    engine.save_checkpoint(tmp_path, "t")
    before = snapshot(engine)
    for given, word in (
        ({"include": [3]}, "include"),
        ({"exclude": 3}, "exclude"),
        ({"rename": [("a", "b")]}, "rename"),
    ):
        with pytest.raises(UsageError, match=f"load_checkpoint: {word}="):
            engine.load_checkpoint(tmp_path, **given)
    for given in ({"tag": "t" if case.rank else None}, {"load_optimizer_states": not case.rank}):
        with pytest.raises(CheckpointError, match=r"load_checkpoint: .* on rank 1, and .* on rank 0"):
            engine.load_checkpoint(tmp_path, **given)
    assert_same(snapshot(engine), before)
    engine.load_checkpoint(tmp_path, tag="t")
    with pytest.raises(UsageError, match="`blocking` is not the same"):
        engine.save_checkpoint(tmp_path, blocking=bool(case.rank))
    engine.module.blocks[1].up.weight = nn.Parameter(torch.zeros(24, 12, dtype=torch.bfloat16))
    train(engine, case, range(1))
    assert case.rank or "1 parameters ('blocks.1.up.weight', ...) are other Parameter objects" in caplog.text
    with pytest.raises(UsageError, match=r"'blocks\.1\.up\.weight' \(1 in all\) is another Parameter object"):
        engine.save_checkpoint(tmp_path)
