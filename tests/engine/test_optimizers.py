"""Optimizers and schedules through the engine equal the same ones in a plain loop, whoever built them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import sheer
import sheer.testing
from sheer.errors import CheckpointError, ConfigError, UsageError
from sheer.optim.lion import Lion
from sheer.utils import safe_get_full_optimizer_state
from tests.engine.models import Odd, batches, odd
from tests.engine.oracle import Case, assert_same_model, engine_run, plain_run, start
from tests.pairs import beginning, noted, pairs

NEAR = {"rtol": 1e-5, "atol": 1e-6}
everywhere = pytest.mark.world_size(1, 2)


def here(stage: int = 0, **fields) -> Case:
    return Case(stage=stage, world=sheer.testing.world_size(), rank=sheer.testing.rank(), **fields)


# --- optimizers of a user's own ---------------------------------------------------------------------------------------


class Counting(Optimizer):
    """Element-wise, with a Python number, a Python float and a scalar tensor as state, and one that may be None."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=0, decay=1.0, norm=torch.zeros(()), average=torch.zeros_like(param), unused=None)
                state["step"] += 1
                state["decay"] *= group["beta"]
                state["norm"] += 1.0
                state["average"].lerp_(param.grad, 1 - group["beta"])
                rate = group["lr"] / (1 - state["decay"]) / (1 + 0.01 * state["step"]) / state["norm"].item() ** 0.5
                param.sub_(state["average"], alpha=rate)


class AtTheStart(Optimizer):
    """Element-wise; makes its state in the constructor, as Adagrad does."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] = torch.full_like(param, 0.25)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    total = self.state[param]["sum"]
                    total.addcmul_(param.grad, param.grad)
                    param.addcdiv_(param.grad, total.sqrt(), value=-group["lr"])


class Trusting(Optimizer):
    """Each parameter's step is as long as the parameter: LAMB's way, which needs whole tensors."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    length = param.norm() / (param.grad.norm() + 1e-6)
                    param.sub_(param.grad * length, alpha=group["lr"])


class Rows(Optimizer):
    """Adafactor's way: one statistic per row of a matrix, one for all else."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    rows = param.grad.view(param.shape[0], -1) if param.dim() > 1 else param.grad.reshape(1, -1)
                    seen = self.state[param].setdefault("rows", torch.zeros(len(rows), 1))
                    seen.add_(rows.square().mean(1, keepdim=True))
                    param.sub_((rows / (seen.sqrt() + 1e-3)).view_as(param), alpha=group["lr"])


class OverAll(Optimizer):
    """One number over all parameters (as Prodigy's distance): wrong wherever a rank sees a part only."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()
        for param in params:
            param.sub_(param.grad / (total + 1.0), alpha=self.param_groups[0]["lr"])


class ByGroup(Trusting):
    """Whole tensors in some groups only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    length = param.norm() if group.get("trusting") else 1.0
                    param.sub_(param.grad * length, alpha=group["lr"])


# --- optimizers -------------------------------------------------------------------------------------------------------

BY_NAME: dict[str, tuple[dict[str, Any], Callable[[Any], Optimizer]]] = {
    "Adam": ({"weight_decay": 0.1, "amsgrad": True}, torch.optim.Adam),
    "AdamW": ({"betas": [0.8, 0.9]}, torch.optim.AdamW),
    "SGD": ({}, torch.optim.SGD),
    "sgd": ({"momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    "Adagrad": ({"initial_accumulator_value": 0.3, "lr_decay": 0.1}, torch.optim.Adagrad),
    "RMSprop": ({"momentum": 0.5, "centered": True}, torch.optim.RMSprop),
    "Adamax": ({}, torch.optim.Adamax),
    "NAdam": ({}, torch.optim.NAdam),
    "RAdam": ({}, torch.optim.RAdam),
    "Adadelta": ({}, torch.optim.Adadelta),
    "Lion": ({"weight_decay": 0.1}, Lion),
    "tests.engine.test_optimizers.Counting": ({"beta": 0.8}, Counting),
    "tests.engine.test_optimizers.AtTheStart": ({}, AtTheStart),
}


def some_unused(module: nn.Module, tokens: torch.Tensor, rank: int, number: int, *, step: int) -> torch.Tensor:
    return module(tokens, branch=step in (1, 2))


RESUMED = pairs((1, 2), tuple(BY_NAME), (0, 2, 3))


@everywhere
@pytest.mark.parametrize("name", BY_NAME)
def test_equals_the_plain_loop_and_goes_on_from_a_checkpoint(name: str, world_size: int, tmp_path) -> None:
    params, cls = BY_NAME[name]
    for stage in (stage for one, stage in beginning(world_size, RESUMED) if one == name):
        case = here(stage, extra={"optimizer": {"type": name, "params": {"lr": 3e-3, **params}}})
        model, reference = odd(), odd()
        optimizer = cls(reference.parameters(), lr=3e-3, **params)
        engine = start(model, case)
        with noted(stage):
            for step, batch in enumerate(batches(4, size=case.global_batch)):
                if step == 2:
                    engine.save_checkpoint(tmp_path / str(stage))
                    engine.destroy()
                    model = odd(seed=9)
                    engine = start(model, case)
                    engine.load_checkpoint(tmp_path / str(stage))
                engine_run(engine, case, [batch], call=partial(some_unused, step=step))
                plain_run(reference, case, [batch], optimizer=optimizer, call=partial(some_unused, step=step))
            reference.seen.copy_(model.seen)
            assert_same_model(model, reference, **NEAR)
        engine.destroy()


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups with options of their own and an empty one between."""
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    return [{"params": decayed, "lr": 3e-3}, {"params": []}, {"params": others, "lr": 1e-3}]


WAYS = ("instance", "callable", "class", "config over model_parameters")
GIVEN = pairs((1, 2), (0, 1, 2, 3), WAYS, (torch.optim.AdamW, Counting))


def given(way: str, cls: type[Optimizer], model: nn.Module) -> dict[str, Any]:
    """What `initialize` is given besides the model."""
    config = Case().config()
    if way == "config over model_parameters":
        config["optimizer"] = {"type": f"{cls.__module__}.{cls.__name__}", "params": {}}
    else:
        del config["optimizer"]
    if way == "instance":
        return {"optimizer": cls(groups_of(model)), "config": config}
    optimizer = {"callable": lambda params: cls(params), "class": cls}.get(way)
    return {"model_parameters": groups_of(model), "optimizer": optimizer, "config": config}


@everywhere
def test_given_in_any_way(world_size: int) -> None:
    for stage, way, cls in beginning(world_size, GIVEN):
        case = here(stage)
        model, reference = odd(), odd()
        more = given(way, cls, model)
        more["config"]["zero_optimization"] = case.config()["zero_optimization"]
        with noted(stage, way, cls):
            engine, returned, _, _ = sheer.initialize(model=model, **more)
            data = batches(3, size=case.global_batch)
            engine_run(engine, case, data)
            plain_run(reference, case, data, optimizer=cls(groups_of(reference)))
            reference.seen.copy_(model.seen)
            assert_same_model(model, reference, **NEAR)
            assert returned is engine.optimizer
            assert isinstance(returned.optimizer, cls)
            assert way != "instance" or returned.optimizer is more["optimizer"]
            engine.destroy()
            if way == "instance":
                groups = more["optimizer"].param_groups
                assert [len(g["params"]) for g in groups] == [len(g["params"]) for g in groups_of(model)]


STEPPED = pairs((1, 2), (0, 1, 2, 3), (torch.optim.Adagrad, torch.optim.AdamW, Counting, AtTheStart))


@everywhere
def test_an_optimizer_that_has_stepped_keeps_its_state(world_size: int) -> None:
    for stage, make in beginning(world_size, STEPPED):
        case = here(stage)
        model, reference = odd(), odd()
        plain = Case(micro=case.global_batch)
        data = batches(4, size=case.global_batch)
        optimizer, theirs = make(model.parameters()), make(reference.parameters())
        plain_run(model, plain, data[:2], optimizer=optimizer)
        plain_run(reference, plain, data[:2], optimizer=theirs)
        key = "sum" if make in (torch.optim.Adagrad, AtTheStart) else "average" if make is Counting else "exp_avg"
        weight = reference.blocks[1].up.weight
        with noted(stage, make):
            engine = sheer.initialize(model=model, optimizer=optimizer, config=case.config())[0]
            assert torch.equal(safe_get_full_optimizer_state(model.blocks[1].up.weight, key), theirs.state[weight][key])
            engine_run(engine, case, data[2:])
            plain_run(reference, case, data[2:], optimizer=theirs)
            reference.seen.copy_(model.seen)
            assert_same_model(model, reference, **NEAR)
        engine.destroy()


@everywhere
def test_state_of_low_precision_goes_to_fp32_with_its_master() -> None:
    case = here(1, extra={"bf16": {"enabled": True}})
    model = odd().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    plain_run(model, Case(), batches(1, size=2), optimizer=optimizer)
    moment = optimizer.state[model.gain]["exp_avg"].clone()
    assert moment.dtype is torch.bfloat16
    engine = sheer.initialize(model=model, optimizer=optimizer, config=case.config())[0]
    mine = safe_get_full_optimizer_state(model.gain, "exp_avg")
    assert torch.equal(mine, moment.float())
    assert mine.dtype is torch.float32
    engine_run(engine, case, batches(1, size=case.global_batch))


@pytest.mark.parametrize("accumulated", [1.0])
def test_python_numbers_keep_all_their_digits(accumulated: float, tmp_path) -> None:
    case = Case(extra={"optimizer": {"type": "tests.engine.test_optimizers.Counting", "params": {"beta": 0.7}}})
    model = odd()
    engine = start(model, case)
    engine_run(engine, case, batches(5, size=case.global_batch))
    engine.save_checkpoint(tmp_path)
    for _ in range(5):
        accumulated *= 0.7
    again = start(odd(), case)
    again.load_checkpoint(tmp_path)
    state = next(iter(again.flat_optimizer().base.state.values()))
    assert state["decay"] == accumulated
    assert state["step"] == 5
    assert type(state["step"]) is int


# --- optimizers that need whole tensors -------------------------------------------------------------------------------


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dim() == 2 and p.numel()]


def muon(module: nn.Module) -> Optimizer:
    return torch.optim.Muon(matrices(module), lr=1e-2)


def by_group(module: nn.Module) -> Optimizer:
    rest = [p for p in module.parameters() if p.dim() != 2]
    return ByGroup([{"params": rest}, {"params": matrices(module), "trusting": True}])


WHOLE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Muon": muon,
    "LAMB-like": lambda module: Trusting(module.parameters()),
    "Adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=1e-2),
    "Adafactor-like": lambda module: Rows(module.parameters()),
    "one number over all": lambda module: OverAll(module.parameters()),
    "one group only": by_group,
}


@everywhere
@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensors_at_stage_0(name: str, tmp_path) -> None:
    case = here(0)
    model, reference = odd(), odd()
    data = batches(4, size=case.global_batch)
    theirs = WHOLE[name](reference)
    engine = sheer.initialize(model=model, optimizer=WHOLE[name](model), config=case.config())[0]
    engine_run(engine, case, data[:2])
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    model = odd(seed=5)
    engine = sheer.initialize(model=model, optimizer=WHOLE[name](model), config=case.config())[0]
    engine.load_checkpoint(tmp_path)
    engine_run(engine, case, data[2:])
    plain_run(reference, case, data, optimizer=theirs)
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, **NEAR)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensors_are_refused_where_they_are_cut(stage: int, name: str) -> None:
    model = odd()
    addresses = [p.data_ptr() for p in model.parameters()]
    optimizer = WHOLE[name](model)
    with pytest.raises(UsageError, match=rf"{type(optimizer).__name__} .*stage 0.*AdamW"):
        sheer.initialize(model=model, optimizer=optimizer, config=here(stage).config())
    assert [p.data_ptr() for p in model.parameters()] == addresses  # the model was not touched


@pytest.mark.world_size(2)
def test_whole_tensors_are_found_when_the_learning_rate_is_0() -> None:
    """A warmup sets it before the engine looks."""
    warmup = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    model = odd()
    with pytest.raises(UsageError, match="Trusting updates a parameter by more than its own element"):
        sheer.initialize(model=model, optimizer=Trusting, config=here(1).config(**warmup))


# --- schedules --------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.1, 0.2], total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


def momentum(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(groups_of(module), lr=0.1, momentum=0.9)


def scheduled(way: str, make: Callable[[Optimizer], Any]) -> tuple[Any, Odd]:
    model = odd()
    optimizer = momentum(model)
    given = {"instance": lambda: make(optimizer), "callable": lambda: make}.get(way, lambda: None)()
    config = Case(extra={}).config()
    engine, returned, _, scheduler = sheer.initialize(
        model=model, optimizer=optimizer, lr_scheduler=given, config=config
    )
    if way == "over the returned optimizer":
        scheduler = engine.lr_scheduler = make(returned)
    assert engine.lr_scheduler is scheduler
    assert all(a is b for a, b in zip(scheduler.optimizer.param_groups, engine.optimizer.param_groups, strict=True))
    return engine, model


@pytest.mark.parametrize("way", ["instance", "callable", "over the returned optimizer"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_equals_the_plain_loop_and_goes_on(way: str, name: str, tmp_path) -> None:
    """Warnings are errors here: torch warns where it thinks that the order of steps is wrong."""
    make, case = SCHEDULES[name], Case()
    reference = odd()
    optimizer = momentum(reference)
    scheduler = make(optimizer)
    engine, model = scheduled(way, make)
    for step, batch in enumerate(batches(7, size=case.global_batch)):
        if step == 3:
            engine.save_checkpoint(tmp_path)
            engine.destroy()
            engine, model = scheduled(way, make)
            engine.load_checkpoint(tmp_path)
            groups = engine.lr_scheduler.optimizer.param_groups
            assert all(a is b for a, b in zip(groups, engine.optimizer.param_groups, strict=True))
        wanted = [(group["lr"], group["momentum"]) for group in optimizer.param_groups]
        assert [(group["lr"], group["momentum"]) for group in engine.optimizer.param_groups] == wanted
        engine_run(engine, case, [batch])
        plain_run(reference, case, [batch], optimizer=optimizer, scheduler=scheduler)
        assert engine.last_step.lr == tuple(rate for rate, _ in wanted)
    assert engine.get_lr() == [group["lr"] for group in optimizer.param_groups]
    assert engine.lr_scheduler.get_last_lr() == scheduler.get_last_lr()
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, **NEAR)


BY_CONFIG = {
    "StepLR": ({"step_size": 2, "gamma": 0.5}, lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5)),
    "OneCycleLR": ({"max_lr": 0.1, "total_steps": 9}, lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9)),
    "torch.optim.lr_scheduler.CosineAnnealingLR": ({"T_max": 5}, lambda o: lr_scheduler.CosineAnnealingLR(o, 5)),
}


@everywhere
@pytest.mark.parametrize("name", BY_CONFIG)
def test_schedules_by_config(name: str) -> None:
    params, make = BY_CONFIG[name]
    case = here(2, extra={"scheduler": {"type": name, "params": params}})
    model, reference = odd(), odd()
    data = batches(4, size=case.global_batch)
    engine = start(model, case)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    engine_run(engine, case, data)
    plain_run(reference, case, data, optimizer=optimizer, scheduler=make(optimizer))
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, **NEAR)
    assert engine.get_lr() == [group["lr"] for group in optimizer.param_groups]


def plateau() -> tuple[Any, Odd]:
    model = odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return sheer.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=Case().config())[0], model


def test_a_plateau_needs_its_metric_before_anything_moves(tmp_path) -> None:
    engine, model = plateau()
    batch = batches(1, size=2)[0]
    for metric in (1.0, 2.0, 3.0):
        engine.backward(engine(batch))
        engine.step(lr_kwargs={"metrics": metric})
    assert engine.get_lr() == pytest.approx([0.001])
    engine.save_checkpoint(tmp_path)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=r'lr_kwargs=\{"metrics": value\}'):
        engine.train_batch(iter([batch]))
    engine.backward(engine(batch))
    with pytest.raises(UsageError, match=r'lr_kwargs=\{"metrics": value\}'):
        engine.step()
    assert torch.equal(model.head.weight, before["head.weight"])
    engine.step(lr_kwargs={"metrics": 1.0})
    again, _ = plateau()
    again.load_checkpoint(tmp_path)
    assert again.get_lr() == pytest.approx([0.001])
    assert again.lr_scheduler.best == 1.0


def test_a_schedule_goes_on_where_the_optimizer_starts_afresh(tmp_path) -> None:
    engine, _ = scheduled("callable", SCHEDULES["CosineAnnealingLR"])
    engine_run(engine, Case(), batches(3, size=2))
    engine.save_checkpoint(tmp_path)
    again, _ = scheduled("callable", SCHEDULES["CosineAnnealingLR"])
    again.load_checkpoint(tmp_path, load_optimizer_states=False)
    for one in (engine, again):
        engine_run(one, Case(), batches(1, size=2))
    assert again.get_lr() == engine.get_lr()


def test_another_schedule_is_refused_and_nothing_changes(tmp_path) -> None:
    engine, _ = scheduled("callable", SCHEDULES["StepLR"])
    engine_run(engine, Case(), batches(3, size=2))
    engine.save_checkpoint(tmp_path)
    again, model = scheduled("callable", SCHEDULES["CosineAnnealingLR"])
    before, state = copy.deepcopy(model.state_dict()), again.lr_scheduler.state_dict()
    with pytest.raises(CheckpointError, match=r"scheduler StepLR.*CosineAnnealingLR.*load_lr_scheduler_states=False"):
        again.load_checkpoint(tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert again.lr_scheduler.state_dict() == state
    again.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert again.global_steps == 3


# --- hyper-parameters -------------------------------------------------------------------------------------------------


def test_the_checkpoints_hyperparameters_win_and_it_is_said(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    first = start(odd(), Case())
    engine_run(first, Case(), batches(1, size=2))
    first.save_checkpoint(tmp_path)
    changed = {"optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.0, "foreach": True}}}
    engine = start(odd(), Case(extra=changed))
    with caplog.at_level(logging.WARNING, "sheer"):
        engine.load_checkpoint(tmp_path)
    group = engine.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (1e-2, 0.1)
    assert group["foreach"] is True  # how it is computed is this run's business
    assert "group 0: lr 0.005 here, 0.01 in the checkpoint" in caplog.text
    assert "group 0: weight_decay 0.0 here, 0.1 in the checkpoint" in caplog.text
    assert "foreach" not in caplog.text
    kept = start(odd(), Case(extra=changed))
    kept.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert kept.get_lr() == [5e-3]


def test_a_learning_rate_in_a_tensor_stays_that_tensor(tmp_path) -> None:
    def build() -> tuple[Any, torch.Tensor]:
        model, rate = odd(), torch.tensor(0.05)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        return sheer.initialize(model=model, optimizer=optimizer, config=Case().config())[0], rate

    engine, rate = build()
    rate.fill_(0.125)
    engine_run(engine, Case(), batches(1, size=2))
    engine.save_checkpoint(tmp_path)
    again, rate = build()
    again.load_checkpoint(tmp_path)
    assert again.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125


def test_bad_optimizers_and_schedules_are_refused_with_their_key() -> None:
    for broken, error, words in (
        ({"optimizer": {"type": "AdamWW"}}, ConfigError, r"optimizer\.type='AdamWW'.*AdamW"),
        ({"optimizer": {"type": "Muon"}}, ConfigError, r"Muon.*2D parameters"),
        ({"scheduler": {"type": "StepLR", "params": {"size": 3}}}, ConfigError, r"scheduler\.params.*size"),
    ):
        with pytest.raises(error, match=words):
            start(odd(), Case(extra=broken))
