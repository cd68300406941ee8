"""The schedules: their values against those DeepSpeed 0.19.8 gave, and that they live in the optimizer's groups."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from sheer.errors import ConfigError
from sheer.optim.schedules import OneCycle, WarmupLR, build_scheduler


def optimizer(cls=torch.optim.Adam, *, lrs=(0.1, 0.02), **options) -> torch.optim.Optimizer:
    return cls([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs], **options)


# (name, parameters, learning rates of the first group at iterations -1, 0, 1, ..., those of the second group).
# Recorded by running DeepSpeed 0.19.8 over two groups with lr 0.1 and 0.02, rounded to ten digits.
RECORDED = [
    (
        "WarmupLR",
        {"warmup_max_lr": 0.1, "warmup_num_steps": 4},
        [0.0, 0.0, 0.05, 0.079248125, 0.1, 0.1, 0.1],
        None,
    ),
    (
        "WarmupLR",
        {"warmup_num_steps": 4, "warmup_min_lr": 0.01, "warmup_type": "linear"},
        [0.01, 0.01, 0.0325, 0.055, 0.0775, 0.1, 0.1],
        [0.01, 0.01, 0.0125, 0.015, 0.0175, 0.02, 0.02],
    ),
    ("WarmupLR", {"warmup_num_steps": 1}, [0.0, 0.0, 0.1, 0.1], [0.0, 0.0, 0.02, 0.02]),
    (
        "WarmupLR",
        {"warmup_max_lr": [0.1, 0.2], "warmup_min_lr": [0.01, 0.02], "warmup_num_steps": 4},
        [0.01, 0.01, 0.055, 0.0813233125, 0.1, 0.1],
        [0.02, 0.02, 0.11, 0.1626466251, 0.2, 0.2],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 8, "warmup_num_steps": 4},
        [0.0, 0.0, 0.0005, 0.0007924813, 0.001, 0.001, 0.00075, 0.0005, 0.00025, 0.0, 0.0],
        None,
    ),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 8,
            "warmup_num_steps": 4,
            "warmup_min_lr": 0.001,
            "warmup_max_lr": 0.01,
            "warmup_type": "linear",
        },
        [0.001, 0.001, 0.00325, 0.0055, 0.00775, 0.01, 0.00775, 0.0055, 0.00325, 0.001, 0.001],
        None,
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 4, "warmup_num_steps": 4},
        [0.0, 0.0, 0.0005, 0.0007924813, 0.001, 0.0, 0.0],
        None,
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 8, "warmup_num_steps": 3},
        [0.0, 0.0, 0.0630929754, 0.1, 0.0904518046, 0.0654543046, 0.0345556954, 0.0095581954, 1e-05, 1e-05],
        [0.0, 0.0, 0.0126185951, 0.02, 0.0180903609, 0.0130908609, 0.0069111391, 0.0019116391, 2e-06, 2e-06],
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 8,
            "warmup_num_steps": 3,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.2,
            "warmup_type": "linear",
        },
        [0.0, 0.01, 0.04, 0.07, 0.0923606798, 0.0723606798, 0.0476393202, 0.0276393202, 0.02, 0.02],
        [0.0, 0.002, 0.008, 0.014, 0.018472136, 0.014472136, 0.009527864, 0.005527864, 0.004, 0.004],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 3, "warmup_num_steps": 3},
        [0.0, 0.0, 0.0630929754, 0.1, 1e-05, 1e-05],
        [0.0, 0.0, 0.0126185951, 0.02, 2e-06, 2e-06],
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "decay_lr_rate": 0.5},
        [0.01, 0.04, 0.07, 0.1, 0.07, 0.04, 0.01, 0.01, 0.01, 0.01],
        None,
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 2,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
        },
        [0.01, 0.04, 0.07, 0.1, 0.055, 0.01, 0.008, 0.0066666667, 0.0057142857, 0.005],
        None,
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_first_stair_count": 2},
        [0.01, 0.01, 0.055, 0.055, 0.1, 0.055, 0.055, 0.01, 0.01, 0.01],
        None,
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2,
            "cycle_second_step_size": 6,
            "cycle_second_stair_count": 3,
        },
        [0.01, 0.01, 0.055, 0.055, 0.1, 0.07, 0.07, 0.04, 0.04, 0.01],
        None,
    ),
    (
        "LRRangeTest",
        {"lr_range_test_step_size": 3},
        [0.001, 0.0013333333, 0.0016666667, 0.002, 0.0023333333],
        None,
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 0.01,
            "lr_range_test_step_size": 3,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
        },
        [0.01, 0.01, 0.01, 0.03, 0.03, 0.03, 0.05],
        None,
    ),
]


@pytest.mark.parametrize(("name", "params", "first", "second"), RECORDED)
def test_values_agree_with_deepspeed(name, params, first, second):
    opt = optimizer()
    groups = list(opt.param_groups)
    schedule = build_scheduler(name, params, opt)
    seen = []
    for _ in first:
        seen.append([group["lr"] for group in groups])
        assert schedule.get_last_lr() == schedule.get_lr() == seen[-1]
        opt.step()
        schedule.step()
    assert [lr[0] for lr in seen] == pytest.approx(first, abs=1e-10)
    assert [lr[1] for lr in seen] == pytest.approx(second or first, abs=1e-10)
    assert all(now is before for now, before in zip(opt.param_groups, groups, strict=True))


@pytest.mark.parametrize(("name", "params"), [row[:2] for row in RECORDED])
def test_the_state_is_one_json_number_and_resumes(name, params):
    whole = build_scheduler(name, params, optimizer())
    for _ in range(4):
        whole.step()
    state = json.loads(json.dumps(whole.state_dict()))
    assert state == {"last_batch_iteration": 3}

    opt = optimizer()
    resumed = build_scheduler(name, params, opt)
    resumed.load_state_dict(state)
    for _ in range(4):
        assert [group["lr"] for group in opt.param_groups] == whole.get_last_lr()
        resumed.step()
        whole.step()


def test_it_is_a_torch_scheduler_and_leaves_the_optimizers_step_alone():
    opt = optimizer()
    schedule = build_scheduler("warmuplr", {"last_batch_iteration": 5, "warmup_num_steps": "auto"}, opt)
    assert isinstance(schedule, LRScheduler)
    assert isinstance(schedule, WarmupLR)
    assert "step" not in vars(opt)
    assert schedule.last_batch_iteration == schedule.last_epoch == 5
    assert opt.param_groups[0]["lr"] == pytest.approx(0.1 * math.log(6) / math.log(1000))


def test_step_can_jump():
    opt = optimizer()
    schedule = build_scheduler("WarmupLR", {"warmup_num_steps": 10, "warmup_type": "linear"}, opt)
    schedule.step(5)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.05)
    schedule.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.06)


def test_a_second_schedule_starts_from_the_groups_own_lr():
    opt = optimizer()
    build_scheduler("WarmupLR", {"warmup_num_steps": 2}, opt)
    again = build_scheduler("WarmupLR", {"warmup_num_steps": 2}, opt)
    again.step(9)
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.02]


def test_an_lr_tensor_keeps_its_identity():
    lr = torch.tensor(0.1)
    opt = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = build_scheduler("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, opt)
    assert lr.item() == 0.0
    schedule.step(1)
    assert opt.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.05)


def cycled(cls, key, **options) -> list[float]:
    """What OneCycle does to the first group's `key` at iterations -1 .. 3."""
    opt = optimizer(cls, **options)
    schedule = build_scheduler("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2}, opt)
    seen = []
    for _ in range(5):
        seen.append(opt.param_groups[0][key])
        schedule.step()
    return seen


def test_one_cycle_moves_momentum_the_other_way():
    betas = cycled(torch.optim.Adam, "betas", betas=(0.9, 0.95))
    assert [beta[0] for beta in betas] == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9])
    assert {beta[1] for beta in betas} == {0.95}
    assert cycled(torch.optim.SGD, "momentum", momentum=0.5) == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9])
    assert cycled(torch.optim.SGD, "momentum") == [0, 0, 0, 0, 0]


def test_one_cycle_can_leave_momentum_alone_and_keeps_it_below_one():
    common = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2}
    opt = optimizer()
    OneCycle(opt, **common, cycle_momentum=False).step(1)
    assert opt.param_groups[0]["betas"] == (0.9, 0.999)
    OneCycle(opt, **common, decay_step_size=1, decay_mom_rate=1.0).step(50)
    assert opt.param_groups[0]["betas"][0] == 0.999


def test_any_torch_scheduler_by_name_or_path():
    opt = optimizer()
    by_name = build_scheduler("cosineannealinglr", {"T_max": 4}, opt)
    assert type(by_name) is torch.optim.lr_scheduler.CosineAnnealingLR
    opt.step()
    by_name.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.1 * (1 + math.cos(math.pi / 4)) / 2)
    by_path = build_scheduler("torch.optim.lr_scheduler.StepLR", {"step_size": 2}, optimizer())
    assert type(by_path) is torch.optim.lr_scheduler.StepLR


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupDecay", {}, r"scheduler.type='WarmupDecay' is not known.*Did you mean 'WarmupDecayLR'"),
        ("WarmupLR", {"warmup_steps": 3}, r"scheduler.params.warmup_steps=3.*Allowed are.*mean 'warmup_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": "10"}, r"scheduler.params.warmup_num_steps='10': a number is needed"),
        ("WarmupLR", {"warmup_num_steps": 0}, r"warmup_num_steps=0: a number of steps above 0"),
        ("WarmupLR", {"warmup_type": "cosine"}, r"warmup_type='cosine': allowed are 'log', 'linear'"),
        ("WarmupLR", {"warmup_min_lr": [0.1]}, r"warmup_min_lr=\[0.1\] has 1 entries, the optimizer has 2"),
        ("WarmupDecayLR", {}, r"WarmupDecayLR needs total_num_steps; given are none"),
        ("LRRangeTest", {"lr_range_test_staircase": 1}, r"lr_range_test_staircase=1: true or false"),
        ("LambdaLR", {}, r"needs a function, which a config cannot hold\. Build it yourself"),
        ("ReduceLROnPlateau", {}, r"its step needs a metric"),
        ("torch.optim.lr_scheduler.StepL", {}, r"has no class 'StepL'. Did you mean 'StepLR'"),
        ("no.such.module.Thing", {}, r"cannot import module 'no.such.module'"),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1, "mode": "x"}, r"CyclicLR cannot be built with .*mode is invalid"),
        ("StepLR", {"step_size": 2, "optimizer": 1}, r"StepLR has no parameter 'optimizer'"),
        ("CosineAnnealingLR", {"T_max": "4"}, r"scheduler.params.T_max='4': a number is needed\."),
    ],
)
def test_mistakes_name_the_key_and_what_is_allowed(name, params, message):
    with pytest.raises(ConfigError, match=message):
        build_scheduler(name, params, optimizer())
