"""`initialize`: every way to say the same, and every mistake as an error on all ranks with the model untouched."""

from __future__ import annotations

import argparse
import datetime
import json
import logging

import pytest
import torch
from torch import nn

import sheer
import sheer.testing
from sheer import comm
from sheer.errors import ConfigError, DataError, UsageError
from tests.engine.models import odd

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


def test_the_four_come_back_under_their_names() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 3))
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}}
    given = sheer.initialize(model=nn.Linear(3, 1), config={**CONFIG, "scheduler": scheduler}, training_data=data)
    engine, optimizer, loader, schedule = given
    assert engine.optimizer is optimizer is given.optimizer
    assert engine.training_dataloader is loader is given.training_dataloader
    assert engine.lr_scheduler is schedule is given.lr_scheduler
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert len(loader) == 4


def test_a_config_may_come_as_path_dict_or_object(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    for source in (path, str(path), CONFIG, sheer.Config.load(CONFIG)):
        assert sheer.initialize(model=nn.Linear(2, 1), config=source)[0].train_batch_size() == 2
    assert sheer.initialize(model=nn.Linear(2, 1), config_params=CONFIG)[0].train_batch_size() == 2
    args = argparse.Namespace(deepspeed_config=str(path))
    assert sheer.initialize(args, nn.Linear(2, 1))[0].train_batch_size() == 2


def test_a_config_is_given_once() -> None:
    with pytest.raises(ConfigError, match="found none of config, "):
        sheer.initialize(model=nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="found config and config_params"):
        sheer.initialize(model=nn.Linear(2, 1), config=CONFIG, config_params=CONFIG)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("broken", "error", "says"),
    [
        ({"config": {**CONFIG, "zero_optimisation": {"stage": 1}}}, ConfigError, "zero_optimization"),
        ({"config": {**CONFIG, "train_batch_size": 7}}, ConfigError, "7"),
        ({"config": {**CONFIG, "optimizer": {"type": "AdamWW"}}}, ConfigError, "AdamW"),
        ({"config": {**CONFIG, "scheduler": {"type": "WarmUpLR2"}}}, ConfigError, "WarmupLR"),
        ({"model": "no model"}, UsageError, "torch.nn.Module, not str"),
        ({"model": nn.Linear(2, 2, device="meta")}, UsageError, "'weight' is on the meta device"),
        ({"model": nn.ReLU}, UsageError, "not the class ReLU; pass an instance"),
        ({"args": nn.ReLU()}, UsageError, "pass the model as model="),
        ({"training_data": []}, DataError, "empty"),
        ({"training_data": torch.utils.data.DataLoader([1, 2])}, DataError, "not a DataLoader.*loader.dataset"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)}, UsageError, "group 0, parameter 0"),
        ({"mpu": object()}, UsageError, "mpu"),
    ],
)
def test_a_mistake_on_one_rank_is_an_error_on_all(broken, error, says) -> None:
    model = odd()
    before = [param.data_ptr() for param in model.parameters()]
    good = {"model": model, "config": CONFIG}
    given = {**good, **broken} if sheer.testing.rank() == 1 else good
    with pytest.raises(error, match=says) as caught:
        sheer.initialize(**given)
    assert "failed on 1 of 2 ranks" in str(caught.value)
    assert [param.data_ptr() for param in model.parameters()] == before
    sheer.initialize(**good)  # nothing is left that would stand in the way


@pytest.mark.world_size(2)
def test_the_model_must_be_the_same_on_all_ranks() -> None:
    model = nn.Linear(2, 3 if sheer.testing.rank() else 2)
    with pytest.raises(UsageError, match=r"parameter '(weight|bias)' is .*3.* here and .*2.* on rank 0"):
        sheer.initialize(model=model, config=CONFIG)


def test_a_wrapped_model_and_a_trained_one_are_refused() -> None:
    with pytest.raises(UsageError, match=r"wrapped in DataParallel.*model.module"):
        sheer.initialize(model=nn.DataParallel(nn.Linear(2, 1)), config=CONFIG)
    model = nn.Linear(2, 1)
    engine = sheer.initialize(model=model, config=CONFIG)[0]
    with pytest.raises(UsageError, match=r"already trained by an engine; call its destroy\(\)"):
        sheer.initialize(model=model, config=CONFIG)
    engine.destroy()
    sheer.initialize(model=model, config=CONFIG)


def test_ties_in_disguise_and_lazy_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(UsageError, match=r"'0.weight' and '1.weight' are two Parameter objects over the same memory"):
        sheer.initialize(model=model, config=CONFIG)
    with pytest.raises(UsageError, match="lazy parameter"):
        sheer.initialize(model=nn.LazyLinear(2), config=CONFIG)


def test_parameters_that_would_silently_never_train_are_said(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, logger="sheer"):
        sheer.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})
    assert (
        "2 parameters that require grad are in no optimizer group and will not train: 1.weight, 1.bias" in caplog.text
    )


def test_keys_without_effect_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    zero = {"stage": 1, "contiguous_gradients": True, "overlap_comm": True}
    with caplog.at_level(logging.INFO, logger="sheer"):
        sheer.initialize(model=nn.Linear(2, 1), config={**CONFIG, "zero_optimization": zero})
    assert "zero_optimization.contiguous_gradients" in caplog.text
    assert "zero_optimization.overlap_comm" in caplog.text


def test_model_parameters_choose_what_the_config_optimizer_trains() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    groups = [{"params": list(model[0].parameters()), "lr": 0.5}]
    engine, optimizer, _, _ = sheer.initialize(model=model, model_parameters=groups, config=CONFIG)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]
    engine.backward(engine(torch.ones(1, 2)).sum())
    assert engine.step().lr == (0.5,)


def test_without_an_optimizer_the_engine_evaluates_and_saves(tmp_path) -> None:
    model = nn.Linear(2, 1)
    engine, optimizer, _, _ = sheer.initialize(model=model, config={"train_batch_size": 2})
    assert optimizer is None
    x = torch.ones(1, 2)
    assert torch.equal(engine(x), model(x))
    engine.save_checkpoint(tmp_path)
    assert torch.equal(sheer.checkpoint.load_full(tmp_path)["weight"], model.weight)
    engine.backward(engine(x).sum())
    with pytest.raises(UsageError, match="has no optimizer"):
        engine.step()


def test_a_script_s_parser_may_carry_the_config(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    parser = sheer.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed is True
    assert sheer.initialize(args, nn.Linear(2, 1))[0].train_batch_size() == 2


def test_init_distributed_alone_joins_nothing_and_refuses_what_it_cannot_do(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    sheer.init_distributed()
    assert not comm.is_initialized()
    with pytest.raises(UsageError, match=r"dist_backend='mpi': on cpu it is 'gloo'"):
        sheer.init_distributed("mpi")
    with pytest.raises(UsageError, match=r"rank=0: torchrun says where"):
        sheer.init_distributed(rank=0, world_size=1)


@pytest.mark.world_size(2)
def test_init_distributed_joins_once_and_initialize_uses_it(world_size) -> None:
    comm.destroy_process_group()
    sheer.init_distributed("gloo", timeout=datetime.timedelta(seconds=50))
    assert comm.world_size() == world_size
    sheer.init_distributed()
    engine = sheer.initialize(model=nn.Linear(2, 1), config=CONFIG)[0]
    assert engine.world_size == world_size


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_inputs_of_another_dtype_are_named(section) -> None:
    engine = sheer.initialize(model=nn.Linear(2, 1), config={**CONFIG, section: {"enabled": True}})[0]
    with pytest.raises(RuntimeError, match="dtype") as raised:
        engine(torch.randn(2, 2))
    assert any(f"{section} casts the parameters" in note and "torch.float32" in note for note in raised.value.__notes__)
