"""What one run saves another goes on from: any stage, world, precision, optimizer; or nothing changes at all."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sheer
import sheer.testing
from sheer import checkpoint
from sheer.checkpoint import loading
from sheer.checkpoint.reader import Reader
from sheer.errors import CheckpointError, CommError, TornLoadError, UsageError
from sheer.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.engine.everything import PRECISIONS, build, everything, grouped, here, in_world, train
from tests.engine.models import Odd, batches, odd
from tests.engine.oracle import Case, engine_run, start, values
from tests.engine.worlds import Worlds, assert_same, contents, snapshot
from tests.harness import fresh
from tests.pairs import beginning, noted, pairs

everywhere = pytest.mark.world_size(1, 2)
stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


RESTARTS = pairs((1, 2), (0, 1, 2, 3), tuple(PRECISIONS))


@everywhere
def test_a_restart_is_no_event(world_size: int, tmp_path: Path) -> None:
    """To the bit, with other initial weights, in an engine that has trained already or in a new one."""
    for stage, precision in beginning(world_size, RESTARTS):
        with noted(stage, precision):
            goes_on_as_before(stage, precision, tmp_path / f"{stage} {precision}")


def goes_on_as_before(stage: int, precision: str, tmp_path: Path) -> None:
    case = in_world(sheer.testing.world_size(), stage, precision, accumulation=2, micro=2)
    engine = build(1, case)
    train(engine, case, range(2))
    engine.save_checkpoint(tmp_path)
    expected = train(engine, case, range(2, 4))
    end = snapshot(engine)
    for anew in (True, False):
        if anew:
            engine.destroy()
            engine = build(7, case)
        path, client = engine.load_checkpoint(tmp_path)
        assert (path, client) == (str(tmp_path / "global_step2"), {})
        assert train(engine, case, range(2, 4)) == expected
        assert_same(snapshot(engine), end)


@everywhere
@stages
def test_load_full_is_the_state_dict(stage: int, tmp_path: Path) -> None:
    case = here(stage)
    engine = build(1, case)
    train(engine, case, range(2))
    engine.save_checkpoint(tmp_path)
    full, mine = sheer.checkpoint.load_full(tmp_path), values(engine.module)
    assert full.keys() == mine.keys()
    if case.rank == 0:  # buffers are rank 0's
        assert_same(full, {key: value for key, value in mine.items() if key in full})
    fresh = everything(3)
    fresh.load_state_dict(full)
    assert fresh.head.weight is fresh.embed.weight


# --- the whole run ----------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 16), nn.Linear(16, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.one(tokens.float()), 0.5, training=self.training)
        return self.two(hidden).square().mean()


@everywhere
@stages
def test_dropout_goes_on(stage: int, tmp_path: Path) -> None:
    case = here(stage)
    torch.manual_seed(10 + case.rank)
    engine = start(Dropping(), case)
    data = batches(4, size=case.global_batch)
    engine_run(engine, case, data[:2])
    engine.save_checkpoint(tmp_path)
    expected = engine_run(engine, case, data[2:])
    torch.manual_seed(99)
    again = start(Dropping(), case)
    again.load_checkpoint(tmp_path)
    assert engine_run(again, case, data[2:]) == expected


@pytest.mark.world_size(2)
def test_more_ranks_than_saved_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    worlds = Worlds(monkeypatch)
    worlds.within(1, lambda: build(1, in_world(1, 0)).save_checkpoint(tmp_path))
    with caplog.at_level(logging.WARNING, "sheer"):
        worlds.within(2, lambda: build(1, in_world(2, 1)).load_checkpoint(tmp_path))
    if sheer.testing.rank() == 0:
        assert "it was saved by fewer ranks (1), so rank 1 keeps its own random state" in caplog.text


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index] * 5)


@pytest.mark.world_size(3)
@pytest.mark.parametrize(("source", "target"), [(2, 2), (2, 1), (1, 3), (3, 2)])
def test_the_loader_goes_on_in_the_middle_of_an_epoch(
    source: int, target: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = Worlds(monkeypatch)

    def run(world: int, *, load: bool, steps: int) -> list[list[int]]:
        case = in_world(world, 2)
        engine, _, loader, _ = sheer.initialize(model=odd(), config=case.config(), training_data=Numbers())
        if load:
            engine.load_checkpoint(tmp_path)
        epochs = (batch for _ in range(9) for batch in loader)
        taken = []
        for _ in range(steps):
            batch = next(epochs)
            engine.backward(engine(batch % 31))
            engine.step()
            taken.append(sorted(i for part in engine.axis.gather_objects(batch[:, 0].tolist()) for i in part))
        if not load:
            engine.save_checkpoint(tmp_path)
            taken += run_on(engine, epochs)
        return taken

    def run_on(engine: Any, epochs: Any) -> list[list[int]]:
        return [
            sorted(i for part in engine.axis.gather_objects(next(epochs)[:, 0].tolist()) for i in part)
            for _ in range(8)
        ]

    first = worlds.within(source, partial(run, source, load=False, steps=2))
    second = worlds.within(target, partial(run, target, load=True, steps=8))
    if sheer.testing.rank() == 0:
        assert second == first[2:]  # four more of this epoch, then the next
        assert sorted(i for batch in first[:6] for i in batch) == list(range(36))
        assert first[6:] != first[: len(first) - 6]


@everywhere
def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    section = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 3, "hysteresis": 2}
    case = here(1, extra={"fp16": section})
    engine = start(odd(), case)

    def heavy(module, tokens, rank, number):
        return module(tokens) * 1e9

    engine_run(engine, case, batches(2, size=case.global_batch))
    engine_run(engine, case, batches(2, size=case.global_batch), call=heavy)
    engine.save_checkpoint(tmp_path)
    again = start(odd(), case)
    again.load_checkpoint(tmp_path)
    assert again.loss_scale() == engine.loss_scale() == 32.0
    for call in (heavy, None, None, None, None):
        for one in (engine, again):
            engine_run(one, case, batches(1, size=case.global_batch), **({"call": call} if call else {}))
        assert again.loss_scale() == engine.loss_scale()
    assert (again.global_steps, again.skipped_steps) == (engine.global_steps, engine.skipped_steps) == (6, 3)
    assert again.loss_scale() == 32.0


@everywhere
@stages
def test_client_state_and_its_refusal(stage: int, tmp_path: Path) -> None:
    case = here(stage)
    engine = build(1, case)
    state = {"epoch": 3, "best": float("inf"), "names": ["a", ("b", 1)], "by number": {1: None}}
    engine.save_checkpoint(tmp_path, "good", client_state=state)
    with pytest.raises(CheckpointError, match=r"client_state'\]\['model'\] is torch\.nn\.modules\.linear\.Linear"):
        engine.save_checkpoint(tmp_path, "bad", client_state={"model": nn.Linear(1, 1)})
    assert engine.load_checkpoint(tmp_path)[1] == state
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] != ".") == ["good", "latest"]
    train(engine, case, range(1))


@everywhere
@stages
def test_a_load_stages_nothing(stage: int, tmp_path: Path, monkeypatch) -> None:
    """Parameters are read into their own memory, and new optimizer state where it stays."""
    case = here(stage)
    engine = build(1, case)
    train(engine, case, range(1))
    engine.save_checkpoint(tmp_path)
    saved = snapshot(engine)
    train(engine, case, range(1))

    def refused(numel: int, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError(f"{numel} elements of {dtype} are staged")

    monkeypatch.setattr(loading, "host_empty", refused)
    engine.load_checkpoint(tmp_path)
    assert_same(snapshot(engine), saved)


@everywhere
@stages
def test_moments_that_are_there_are_read_into_their_own_memory(stage: int, tmp_path: Path) -> None:
    case = here(stage)
    engine = start(Dropping(), case)
    data = batches(2, size=case.global_batch)
    engine_run(engine, case, data)
    engine.save_checkpoint(tmp_path)
    saved = snapshot(engine)
    engine_run(engine, case, data)

    def places() -> set[int]:
        state = engine.flat_optimizer().base.state.values()
        return {value.data_ptr() for one in state for key, value in one.items() if key != "step"}

    before = places()
    engine.load_checkpoint(tmp_path)
    assert places() == before
    assert_same(snapshot(engine), saved)


@everywhere
def test_an_engine_torn_by_a_load_does_nothing_but_load_again(tmp_path: Path, monkeypatch) -> None:
    case = here(1)
    engine = build(1, case)
    train(engine, case, range(1))
    engine.save_checkpoint(tmp_path)
    saved = snapshot(engine)
    fill, reads = Reader.fill, []

    def dying(self: Reader, requests: Any) -> int:
        reads.append(self)
        if len(reads) == 2:  # the first fills new optimizer state
            raise OSError(5, "Input/output error")
        return fill(self, requests)

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "fill", dying)
        with pytest.raises(TornLoadError, match=r"second read.*Input/output error"):
            engine.load_checkpoint(tmp_path)
    for use in (lambda: train(engine, case, range(1)), lambda: engine.save_checkpoint(tmp_path, "torn"), engine.step):
        with pytest.raises(UsageError, match=r"failed half-way.* load a checkpoint first"):
            use()
    engine.load_checkpoint(tmp_path)
    assert_same(snapshot(engine), saved)
    train(engine, case, range(1))


# --- parts of a checkpoint --------------------------------------------------------------------------------------------


WAYS: dict[str, dict[str, Any]] = {
    "load_module_only": {"load_module_only": True},
    "load_optimizer_states=False": {"load_optimizer_states": False},
    "custom_load_fn": {"custom_load_fn": lambda src, dst: dst.load_state_dict(src)},
}
ALONE = pairs((1, 2), (0, 1, 2, 3), ("fp32", "bf16"), tuple(WAYS))


@everywhere
def test_weights_alone_refresh_the_masters(world_size: int, tmp_path: Path) -> None:
    for stage, precision, way in beginning(world_size, ALONE):
        with noted(stage, precision, way):
            assert_refreshes_the_masters(stage, precision, way, tmp_path / f"{stage} {precision} {way}")


def assert_refreshes_the_masters(stage: int, precision: str, way: str, tmp_path: Path) -> None:
    case = in_world(sheer.testing.world_size(), stage, precision)
    first = build(1, case)
    train(first, case, range(2))
    first.save_checkpoint(tmp_path)
    stored = contents(tmp_path / "global_step2")
    engine = build(2, case)
    train(engine, case, range(3))
    weight = engine.module.blocks[1].up.weight
    moment = safe_get_full_optimizer_state(weight, "exp_avg")
    engine.load_checkpoint(tmp_path, **WAYS[way])
    shown = values(engine.module)
    for fqn, param in engine.module.named_parameters():
        value = stored[checkpoint.Key("param", fqn)]
        assert torch.equal(shown[fqn], value.to(param.dtype)), fqn
        if param.requires_grad and way != "custom_load_fn":  # which goes through the parameters, as it likes
            assert torch.equal(safe_get_full_fp32_param(param), value), fqn
    loaded = stored[checkpoint.Key("optim.exp_avg", "blocks.1.up.weight")]
    kept = loaded if way == "custom_load_fn" else moment
    assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), kept)
    assert engine.global_steps == (3 if way == "load_module_only" else 2)
    before = safe_get_full_fp32_param(weight)
    train(engine, case, range(3, 4))
    moved = safe_get_full_fp32_param(weight)
    assert 0 < float((moved - before).abs().max()) < 0.05  # on from there, not from where it was


@everywhere
@stages
def test_replaced_data_does_not_come_back_after_a_load(stage: int, tmp_path: Path) -> None:
    case = in_world(sheer.testing.world_size(), stage, "bf16")
    engine = build(1, case)
    engine.save_checkpoint(tmp_path)
    for param in engine.module.parameters():
        param.data = torch.full_like(param, 5.0)
    engine.load_checkpoint(tmp_path)
    stored = contents(tmp_path / "global_step0")
    for _ in range(2):
        shown = values(engine.module)
        for fqn, param in engine.module.named_parameters():
            value = stored[checkpoint.Key("param", fqn)]
            assert torch.equal(shown[fqn], value.to(param.dtype)), fqn
        engine._runtime.heed_user()


@everywhere
@pytest.mark.parametrize("strict", [True, False])
def test_other_names(strict: bool, tmp_path: Path) -> None:
    case = here(2)
    first = start(odd(), case)
    engine_run(first, case, batches(1, size=case.global_batch))
    first.save_checkpoint(tmp_path)
    model = odd(seed=4)
    model.sometime = model.sometimes
    del model.sometimes
    model.forward = lambda tokens, branch=False: Odd.forward(model, tokens)
    engine = start(model, case)
    before = snapshot(engine)
    if strict:
        with pytest.raises(CheckpointError, match=r"missing: param 'sometime\.weight'.*nearest.*'sometimes\.weight'"):
            engine.load_checkpoint(tmp_path)
        assert_same(snapshot(engine), before)
        return
    kept = model.sometime.weight.detach().clone()
    engine.load_checkpoint(tmp_path, load_module_strict=False)
    assert torch.equal(model.sometime.weight, kept)
    assert torch.equal(model.embed.weight, first.module.embed.weight)
    engine_run(engine, case, batches(1, size=case.global_batch))


@everywhere
@stages
def test_without_frozen_parameters(stage: int, tmp_path: Path) -> None:
    case = in_world(sheer.testing.world_size(), stage, "bf16")
    first = build(1, case)
    train(first, case, range(2))
    first.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    names = {key.name for key in contents(tmp_path / "global_step2") if key.kind == "param"}
    assert names == {fqn for fqn, p in first.module.named_parameters() if p.requires_grad}
    engine = build(2, case)
    kept = values(engine.module)
    engine.load_checkpoint(tmp_path)
    now = values(engine.module)
    assert torch.equal(now["frozen.weight"], kept["frozen.weight"])
    assert torch.equal(now["embed.weight"], values(first.module)["embed.weight"])


FREEZING = pairs((1, 2), (0, 1, 2, 3), ("fp32", "bf16"))


@everywhere
def test_frozen_in_one_run_and_trained_in_another(world_size: int, tmp_path: Path) -> None:
    """State of what does not train is kept for when it does."""
    for stage, precision in beginning(world_size, FREEZING):
        with noted(stage, precision):
            keeps_the_state_of_what_is_frozen(stage, precision, tmp_path / f"{stage} {precision}")


def keeps_the_state_of_what_is_frozen(stage: int, precision: str, tmp_path: Path) -> None:
    case = in_world(sheer.testing.world_size(), stage, precision)
    first = build(1, case)
    train(first, case, range(2))
    first.save_checkpoint(tmp_path / "a")
    model = everything(2)
    model.blocks[0].requires_grad_(False)
    second = sheer.initialize(model=model, optimizer=grouped(model, torch.optim.AdamW), config=case.config())[0]
    second.load_checkpoint(tmp_path / "a")
    train(second, case, range(2, 4))
    second.save_checkpoint(tmp_path / "b")
    third = build(3, case)
    third.load_checkpoint(tmp_path / "b")
    a, b = contents(tmp_path / "a" / "global_step2"), contents(tmp_path / "b" / "global_step4")
    assert a.keys() == b.keys()
    held = [key for key in a if key.name.startswith("blocks.0.") and key.kind.startswith("optim.")]
    assert len(held) == 18  # three states of six parameters
    for key in held:
        assert torch.equal(a[key], b[key]), key
    mine = safe_get_full_optimizer_state(third.module.blocks[0].up.weight, "exp_avg")
    assert torch.equal(mine, a[checkpoint.Key("optim.exp_avg", "blocks.0.up.weight")])
    train(third, case, range(4, 5))
    assert safe_get_full_optimizer_state(third.module.blocks[0].up.weight, "step").item() == 3
    assert safe_get_full_optimizer_state(third.module.blocks[1].up.weight, "step").item() == 5


# --- refusals ---------------------------------------------------------------------------------------------------------


@everywhere
@stages
def test_a_save_in_the_middle_of_a_step_is_refused(stage: int, tmp_path: Path) -> None:
    case = here(stage, accumulation=2)
    engine = build(1, case)
    tokens = batches(1, size=case.micro)[0]
    engine.backward(engine(tokens))
    with pytest.raises(UsageError, match="save_checkpoint in the middle of a step"):
        engine.save_checkpoint(tmp_path)
    engine.step()
    with pytest.raises(UsageError, match="1 of 2 micro-batches"):
        engine.save_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []
    engine.flush()
    engine.save_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step1")


@everywhere
def test_a_load_in_the_middle_of_a_step_starts_anew(tmp_path: Path) -> None:
    case = here(2, accumulation=2)
    engine = build(1, case)
    engine.save_checkpoint(tmp_path)
    expected = train(engine, case, range(2))
    engine.backward(engine(batches(1, size=case.micro)[0]))
    engine.step()
    engine.load_checkpoint(tmp_path)
    assert train(engine, case, range(2)) == expected


@pytest.mark.world_size(3)
@pytest.mark.parametrize("alone", [0, 2])
@pytest.mark.parametrize("what", ["save", "load"])
def test_a_call_on_some_ranks_only_names_the_others(alone: int, what: str, tmp_path: Path) -> None:
    case = here(2, extra={"checkpoint": {"timeout_seconds": 0.4}})
    engine = build(1, case)
    train(engine, case, range(1))
    if case.rank == alone:
        others = ", ".join(str(rank) for rank in range(3) if rank != alone)
        call = engine.save_checkpoint if what == "save" else engine.load_checkpoint
        with pytest.raises(CommError, match=rf"in vain for rank\(s\) {others} of 3"):
            call(tmp_path)
    expected = train(engine, case, range(1, 2))
    engine.save_checkpoint(tmp_path, "all")
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "all")
    assert engine.global_steps == 2
    assert expected[0].loss > 0


@everywhere
def test_nothing_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = here(1)
    engine = build(1, case)
    before = snapshot(engine)
    with caplog.at_level(logging.WARNING, "sheer"):
        assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
        assert engine.load_checkpoint(tmp_path) == (None, None)
    if case.rank == 0:
        assert f"there is no checkpoint in {tmp_path / 'nowhere'}; nothing was loaded" in caplog.text
    engine.save_checkpoint(tmp_path, "one")
    engine.save_checkpoint(tmp_path, "two")
    with pytest.raises(CheckpointError, match=r"has no checkpoint 'twoo'.*Did you mean 'two'.*'one', 'two'"):
        engine.load_checkpoint(tmp_path, "twoo")
    assert_same(snapshot(engine), before)


def _flip(folder: Path) -> None:
    file = sorted(folder.glob("*/rank*.safetensors"))[-1]
    raw = bytearray(file.read_bytes())
    raw[-200] ^= 1
    file.write_bytes(raw)


def _cut_rng(folder: Path) -> None:
    file = next(folder.glob("*/rng.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def _nothing(folder: Path) -> None:
    """Nothing is wrong with the checkpoint."""


STEPS = {"scheduler": {"type": "StepLR", "params": {"step_size": 1}}}
FAILURES: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "a flipped bit": (_flip, {}, "do not match their checksum"),
    "damaged random state": (_cut_rng, {}, "rng.safetensors"),
    "another optimizer": (_nothing, {"optimizer": {"type": "Lion"}}, "state of optimizer AdamW, this run uses Lion"),
    "no scheduler saved": (_nothing, STEPS, "has no scheduler state"),
}


FAILED = pairs((1, 2), (0, 1, 2, 3), tuple(FAILURES))


@everywhere
def test_a_failed_load_changes_nothing(world_size: int, tmp_path: Path) -> None:
    for stage, failure in beginning(world_size, FAILED):
        with noted(stage, failure):
            assert_a_failed_load_changes_nothing(stage, failure, tmp_path / f"{stage} {failure}")


def assert_a_failed_load_changes_nothing(stage: int, failure: str, tmp_path: Path) -> None:
    harm, extra, words = FAILURES[failure]
    case = here(stage, extra={"bf16": {"enabled": True}})
    data = batches(3, size=case.global_batch)
    first, _, _, _ = sheer.initialize(model=odd(), config=case.config(), training_data=Numbers())
    engine_run(first, case, data[:1])
    first.save_checkpoint(tmp_path)
    if case.rank == 0:
        harm(tmp_path)
    first.axis.barrier()
    engine, _, loader, _ = sheer.initialize(
        model=odd(seed=3), config=case.config(**extra, gradient_clipping=0.5), training_data=Numbers()
    )
    next(iter(loader))
    engine_run(engine, case, data)
    before = snapshot(engine)
    with pytest.raises(CheckpointError, match=words):
        engine.load_checkpoint(tmp_path)
    assert_same(snapshot(engine), before)
    engine_run(engine, case, data[:1])
    if failure in ("another optimizer", "no scheduler saved"):
        with_less = {"load_optimizer_states": failure != "another optimizer", "load_lr_scheduler_states": False}
        assert engine.load_checkpoint(tmp_path, **with_less)[0] is not None


class Refusing(Odd):
    """Extra state that one run cannot take."""

    refuses = False

    def get_extra_state(self) -> Any:
        return {"refuses": self.refuses}

    def set_extra_state(self, state: Any) -> None:
        if state["refuses"]:
            raise ValueError("cannot take this")
        self.refuses = state["refuses"]


@everywhere
def test_extra_state_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    case = here(1, extra={"scheduler": {"type": "StepLR", "params": {"step_size": 1}}})
    first = start(Refusing(), case)
    first.module.refuses = True
    engine_run(first, case, batches(2, size=case.global_batch))
    first.save_checkpoint(tmp_path)
    engine = start(Refusing(), case)
    before = snapshot(engine)
    with pytest.raises(Exception, match="cannot take this"):
        engine.load_checkpoint(tmp_path)
    assert_same(snapshot(engine), before)


@everywhere
def test_groups_must_be_as_many(tmp_path: Path) -> None:
    case = here(1)
    build(1, case).save_checkpoint(tmp_path)
    engine = start(everything(1), case)
    with pytest.raises(CheckpointError, match="has 3 optimizer groups, this run 1"):
        engine.load_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, load_optimizer_states=False)[0] is not None


def test_a_checkpoint_without_an_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Case().config()
    del config["optimizer"]
    sheer.initialize(model=odd(), config=config)[0].save_checkpoint(tmp_path)
    engine = start(odd(seed=1), Case())
    engine_run(engine, Case(), batches(1, size=2))
    with caplog.at_level(logging.WARNING, "sheer"):
        engine.load_checkpoint(tmp_path)
    assert "the checkpoint has no optimizer state; the optimizer starts afresh" in caplog.text
    assert torch.equal(engine.module.embed.weight, odd().embed.weight)
    assert safe_get_full_optimizer_state(engine.module.embed.weight, "exp_avg") is None
    engine_run(engine, Case(), batches(1, size=2))


# --- killed -----------------------------------------------------------------------------------------------------------


def trained_to_the_end(folder: Path, kill_at: int) -> list[float]:
    """Four steps in all and a save after each; killed at a call of the second save's."""
    case = Case(extra={"bf16": {"enabled": True}})
    engine = start(odd(seed=os.getpid()) if folder.exists() else odd(), case)
    engine.load_checkpoint(folder)
    calls, fsync = 0, os.fsync

    def counted(fd: int) -> None:
        nonlocal calls
        calls += 1
        if engine.global_steps == 2 and calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(fd)

    while engine.global_steps < 4:
        engine_run(engine, case, batches(1, size=2, seed=engine.global_steps))
        calls, os.fsync = 0, counted
        engine.save_checkpoint(folder)
    return [float(p.double().sum()) for p in engine.module.parameters()]


def test_killed_during_a_save_a_new_process_goes_on_to_the_same_end(tmp_path: Path) -> None:
    whole = fresh.result_of(trained_to_the_end, tmp_path / "whole", 0)
    assert whole[0] == 0
    assert fresh.result_of(trained_to_the_end, tmp_path / "cut", 2) == (-signal.SIGKILL, None)
    assert (tmp_path / "cut" / "latest").read_text().strip() == "global_step1"
    assert fresh.result_of(trained_to_the_end, tmp_path / "cut", 0) == whole
