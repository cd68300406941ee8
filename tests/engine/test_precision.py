"""bf16 and fp16 with fp32 masters, autocast, mixed models, against loops written by hand; and what a user changes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import sheer
import sheer.testing
from sheer.errors import UsageError
from sheer.utils import safe_get_full_fp32_param
from tests.engine.models import Odd, batches, odd
from tests.engine.oracle import Case, adamw, assert_same_model, engine_run, plain_run, start, values
from tests.pairs import beginning, noted, pairs

FOREACH = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}}}
"""Fused kernels round the last few elements of a tensor differently, wherever it ends; these do not."""
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
everywhere = pytest.mark.world_size(1, 2)
stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def here(stage: int = 0, *, extra: dict[str, Any], **fields) -> Case:
    world, rank = sheer.testing.world_size(), sheer.testing.rank()
    return Case(stage=stage, world=world, rank=rank, extra=FOREACH | extra, **fields)


def foreach(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, foreach=True)


# --- the loop by hand -------------------------------------------------------------------------------------------------


class ByHand:
    """fp32 masters, a low-precision copy in the model, gradients summed in `sum_dtype` and rounded to `wire`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, sum_dtype: torch.dtype = torch.float32) -> None:
        self.module = module
        self.trained = {fqn: p for fqn, p in module.named_parameters() if p.requires_grad}
        self.masters = {fqn: p.detach().clone() for fqn, p in self.trained.items()}
        self.optimizer = foreach(list(self.masters.values()))
        self.sum_dtype = sum_dtype
        for param in module.parameters():
            param.data = param.data.to(dtype)
        for param in self.trained.values():
            param.grad_dtype = sum_dtype

    def gradient(self, batches: Sequence[torch.Tensor], *, loss_scale: float, weight: float = 1.0) -> dict[str, Any]:
        """One rank's sum over micro-batches."""
        for param in self.trained.values():
            param.grad = None
        for tokens in batches:
            (self.module(tokens).float() * weight * loss_scale).backward()
        return {fqn: param.grad for fqn, param in self.trained.items()}

    def reduced(self, case: Case, batch: torch.Tensor, wire: torch.dtype, **scaling: float) -> dict[str, Any]:
        """The sum over ranks and micro-batches, in the order in which stage `case.stage` adds."""
        micro = case.micro_batches(batch)
        windows = [[m] for m in micro] if case.stage >= 2 else [micro]
        total: dict[str, Any] = {}
        for window in windows:
            ranks = [self.gradient([m[rank] for m in window], **scaling) for rank in range(case.world)]
            for fqn, first in ranks[0].items():
                if first is None:
                    continue
                part = first if case.world == 1 else first.to(wire) + ranks[1][fqn].to(wire)
                part = part.to(self.sum_dtype)
                total[fqn] = part if fqn not in total else total[fqn] + part
        return total

    def apply(self, gradients: dict[str, Any], factor: float) -> None:
        for fqn, master in self.masters.items():
            master.grad = (gradients[fqn].float() * factor) if fqn in gradients else None
        self.optimizer.step()
        with torch.no_grad():
            for fqn, param in self.trained.items():
                param.copy_(self.masters[fqn])

    def train(self, case: Case, data: Sequence[torch.Tensor], *, wire: torch.dtype, loss_scale: float = 1.0) -> None:
        for batch in data:
            total = self.reduced(case, batch, wire, loss_scale=loss_scale)
            self.apply(total, 1.0 / (case.world * case.accumulation * loss_scale))


def assert_same_masters(model: nn.Module, hand: ByHand, *, bitwise: bool = True) -> None:
    """Collective."""
    ours = values(model)
    for fqn, param in model.named_parameters():
        theirs = hand.module.get_parameter(fqn)
        assert param.dtype is theirs.dtype, fqn
        if fqn not in hand.masters:
            assert torch.equal(ours[fqn], theirs), fqn
            continue
        mine = safe_get_full_fp32_param(param)
        if bitwise:
            assert torch.equal(mine, hand.masters[fqn]), fqn
            assert torch.equal(ours[fqn], theirs), fqn
        else:
            torch.testing.assert_close(mine, hand.masters[fqn], rtol=1e-5, atol=1e-6)


# --- bf16 and fp16 ----------------------------------------------------------------------------------------------------


class Mode(NamedTuple):
    dtype: torch.dtype
    sum_dtype: torch.dtype
    wire: torch.dtype
    extra: dict[str, Any]
    loss_scale: float = 1.0


BF16, FP32 = torch.bfloat16, torch.float32
ON = {"bf16": {"enabled": True}}
MODES = {
    "bf16": Mode(BF16, FP32, BF16, ON),
    "bf16-sums-in-bf16": Mode(BF16, BF16, BF16, {**ON, "data_types": {"grad_accum_dtype": "bf16"}}),
    "bf16-travels-as-fp32": Mode(BF16, FP32, FP32, {**ON, "communication_data_type": "fp32"}),
    "fp16": Mode(torch.float16, FP32, torch.float16, {"fp16": {"enabled": True, "loss_scale": 64}}, 64.0),
}


BY_HAND = pairs((1, 2), (0, 1, 2, 3), (1, 2), tuple(MODES))


@everywhere
def test_equals_masters_by_hand(world_size: int) -> None:
    for stage, accumulation, mode in beginning(world_size, BY_HAND):
        chosen = MODES[mode]
        case = here(stage, extra=chosen.extra, accumulation=accumulation)
        model, reference = odd(), odd()
        hand = ByHand(reference, chosen.dtype, sum_dtype=chosen.sum_dtype)
        data = batches(3, size=case.global_batch)
        with noted(stage, accumulation, mode):
            engine = start(model, case)
            engine_run(engine, case, data)
            hand.train(case, data, wire=chosen.wire, loss_scale=chosen.loss_scale)
            assert_same_masters(model, hand)
            assert model.seen.dtype is torch.int64
            assert model.scratch.dtype is torch.float32
        engine.destroy()


@everywhere
@stages
@pytest.mark.parametrize("precision", LOW)
def test_clips_the_norm_of_the_unscaled_mean(stage: int, precision: str) -> None:
    section = {"bf16": {"enabled": True}, "fp16": {"enabled": True, "loss_scale": 256}}[precision]
    case = here(stage, extra={precision: section}, clip=0.05)
    model, reference = odd(), odd()
    hand = ByHand(reference, LOW[precision])
    data = batches(3, size=case.global_batch)
    engine = start(model, case)
    steps = engine_run(engine, case, data)
    scale = 256.0 if precision == "fp16" else 1.0
    for batch, step in zip(data, steps, strict=True):
        total = hand.reduced(case, batch, LOW[precision], loss_scale=scale)
        mean = {fqn: gradient.float() / (case.world * scale) for fqn, gradient in total.items()}
        norm = torch.stack([gradient.norm() for gradient in mean.values()]).norm().item()
        assert step.norm == pytest.approx(norm, rel=1e-5)
        assert norm > 0.05
        hand.apply(mean, 0.05 / (norm + 1e-6))
    assert_same_masters(model, hand, bitwise=False)


@everywhere
@stages
def test_masters_start_from_the_users_values(stage: int) -> None:
    case = here(stage, extra={"bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}})
    model = odd()
    given = {fqn: p.detach().clone() for fqn, p in model.named_parameters() if p.requires_grad}
    engine = start(model, case)
    engine_run(engine, case, batches(2, size=case.global_batch))
    for fqn, value in given.items():
        assert torch.equal(safe_get_full_fp32_param(model.get_parameter(fqn)), value), fqn
    assert any(not torch.equal(value, value.bfloat16().float()) for value in given.values())


# --- the loss scale ---------------------------------------------------------------------------------------------------

# (weight of the loss, whether the step is skipped, the scale it used): hysteresis 2, window 2, from 2**4.
STORY = [
    (1.0, False, 16.0),
    (1e9, True, 16.0),  # tolerated once
    (1.0, False, 16.0),
    (1e9, True, 16.0),  # the tolerance is used up: halve
    (1.0, False, 8.0),
    (1.0, False, 8.0),
    (1.0, False, 8.0),  # the window is over: double, and tolerate again
    (1e9, True, 16.0),
    (1.0, False, 16.0),
]
DYNAMIC = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2}}


@everywhere
@stages
def test_dynamic_scale_against_a_loop_by_hand(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    warmup = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}}
    case = here(stage, extra=DYNAMIC | warmup)
    model, reference = odd(), odd()
    hand = ByHand(reference, torch.float16)
    engine = start(model, case)
    rates = []
    for (weight, skipped, scale), batch in zip(STORY, batches(len(STORY), size=case.global_batch), strict=True):
        mine = case.micro_batches(batch)[0][case.rank]
        with caplog.at_level(logging.WARNING, "sheer"):
            caplog.clear()
            # An overflow on one rank must be one for all.
            engine.backward(engine(mine) * (weight if case.rank == case.world - 1 else 1.0))
            result = engine.step()
        assert (result.skipped, result.loss_scale) == (skipped, scale)
        assert engine.was_step_applied() is not skipped
        rates += [] if skipped else [result.lr[0]]
        if skipped:
            if case.rank == 0:
                assert f"at loss scale {scale:g}" in caplog.text
                assert "the gradient of '" in caplog.text
            continue
        total = hand.reduced(case, batch, torch.float16, loss_scale=scale)
        for group in hand.optimizer.param_groups:
            group["lr"] = result.lr[0]
        hand.apply(total, 1.0 / (case.world * scale))
    assert_same_masters(model, hand)
    assert engine.loss_scale() == 16.0
    assert (engine.global_steps, engine.skipped_steps) == (6, 3)
    # The schedule moves with applied steps only.
    assert rates == pytest.approx([0.0, 0.0, 1e-3, 2e-3, 3e-3, 4e-3])


@everywhere
@stages
def test_an_overflow_names_the_parameter(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    case = here(stage, extra=DYNAMIC)
    model = odd()
    engine = start(model, case)
    model.blocks[1].up.weight.register_hook(lambda grad: grad * float("inf"))
    before = values(model)
    with caplog.at_level(logging.WARNING, "sheer"):
        engine_run(engine, case, batches(1, size=case.global_batch))
    if case.rank == 0:
        assert "step 1 skipped: the gradient of 'blocks.1.up.weight' is not finite at loss scale 16" in caplog.text
    now = values(model)
    assert all(torch.equal(now[fqn], before[fqn]) for fqn, _ in model.named_parameters())
    assert engine.get_global_grad_norm() is not None


@everywhere
def test_at_the_minimum_scale_the_run_ends_with_advice_and_can_go_on() -> None:
    section = {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 1, "hysteresis": 1}
    case = here(2, extra={"fp16": section})
    model, reference = odd(), odd()
    engine = start(model, case)

    def diverged(module, tokens, rank, number):
        return module(tokens) * 1e9

    data = batches(4, size=case.global_batch)
    engine_run(engine, case, data[:1], call=diverged)
    with pytest.raises(UsageError, match=r"loss scale at its minimum, 1.*diverged.*lower the learning rate"):
        engine_run(engine, case, data[1:2], call=diverged)
    assert engine.skipped_steps == 2
    hand = ByHand(reference, torch.float16)
    engine_run(engine, case, data[2:])
    hand.train(case, data[2:], wire=torch.float16)
    assert_same_masters(model, hand)


@everywhere
@stages
def test_fp16_gradients_need_the_scale(stage: int) -> None:
    case = here(stage, extra={"fp16": {"enabled": True, "loss_scale": 64}}, accumulation=2)
    model, reference = odd(), odd()
    engine = start(model, case)
    data = batches(3, size=case.global_batch)
    before = values(model)
    for unscaled in (0, 1):  # also where another micro-batch of the step had it
        for number, ranks in enumerate(case.micro_batches(data[0])[: unscaled + 1]):
            loss = engine(ranks[case.rank])
            (loss if number == unscaled else engine.scale(loss)).backward()
            if number < unscaled:
                engine.step()
        with pytest.raises(UsageError, match=r"without the loss scale.*engine\.scale\(loss\)\.backward\(\)"):
            engine.step()
        engine.zero_grad()
        engine.flush()
    now = values(model)
    assert all(torch.equal(now[fqn], before[fqn]) for fqn, _ in model.named_parameters())
    for batch in data:
        for ranks in case.micro_batches(batch):
            engine.scale(engine(ranks[case.rank])).backward()
            engine.step()
    hand = ByHand(reference, torch.float16)
    hand.train(case, data, wire=torch.float16, loss_scale=64.0)
    assert_same_masters(model, hand)


@everywhere
@stages
def test_bf16_skips_what_is_not_finite_on_request(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    for check in (True, False):
        case = here(stage, extra={"bf16": {"enabled": True, "check_grad_overflow": check}})
        model = odd()
        engine = start(model, case)
        before = values(model)["embed.weight"]
        poison = float("nan") if case.rank == case.world - 1 else 1.0
        with caplog.at_level(logging.WARNING, "sheer"):
            engine.backward(engine(batches(1, size=case.micro)[0]) * poison)
            result = engine.step()
        assert result.skipped is check
        now = values(model)["embed.weight"]
        assert torch.equal(now, before) is check
        assert now.isnan().any().item() is not check
        engine.destroy()


# --- autocast ---------------------------------------------------------------------------------------------------------


@everywhere
@stages
def test_autocast_equals_autocast_by_hand(stage: int) -> None:
    case = here(stage, extra={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, accumulation=2)
    model, reference = odd(), odd()

    def by_hand(module, tokens, rank, number):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(tokens)

    data = batches(3, size=case.global_batch)
    ours = engine_run(start(model, case), case, data)
    theirs = plain_run(reference, case, data, optimizer=foreach(reference.parameters()), call=by_hand)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, rtol=1e-4, atol=1e-5)
    assert model.embed.weight.dtype is torch.float32


def test_fp16_autocast_has_a_loss_scale() -> None:
    """Without one, gradients below 6e-8 would vanish; torch's own recipe is a GradScaler."""
    case = here(extra={"torch_autocast": {"enabled": True, "dtype": "float16"}})
    model = odd()
    engine = start(model, case)
    assert engine.loss_scale() == 2.0**16
    result = engine_run(engine, case, batches(1, size=case.global_batch))
    assert result[0].norm > 0
    (engine(batches(1, size=2)[0])).backward()
    with pytest.raises(UsageError, match="without the loss scale"):
        engine.step()


# --- dtypes as given --------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """bf16, fp32 and fp64 parameters in one model, and some that are no floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(4, 4).bfloat16()
        self.middle = nn.Linear(4, 4)
        self.high = nn.Linear(4, 2).double()
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(self.middle(self.low(x.bfloat16()).float()).double()).square().mean()


@everywhere
@stages
def test_islands_of_other_dtypes(stage: int) -> None:
    torch.manual_seed(0)
    case = here(stage, extra={}, clip=0.5)
    model = Mixed()
    reference = copy.deepcopy(model)
    dtypes = {fqn: p.dtype for fqn, p in model.named_parameters()}

    def call(module, tokens, rank, number):
        return module(tokens[:, :4].float())

    data = batches(4, size=case.global_batch)
    engine = start(model, case)
    engine_run(engine, case, data, call=call)
    assert {fqn: p.dtype for fqn, p in model.named_parameters()} == dtypes
    masters = {fqn: p.detach().float() if p.dtype is BF16 else p.detach() for fqn, p in reference.named_parameters()}
    trained = [fqn for fqn, p in reference.named_parameters() if p.requires_grad]
    optimizer = foreach([masters[fqn] for fqn in trained])
    for batch in data:
        for tokens in case.micro_batches(batch)[0]:
            (call(reference, tokens, 0, 0) / case.world).backward()
        for fqn in trained:
            masters[fqn].grad = reference.get_parameter(fqn).grad.to(masters[fqn].dtype)
        norm = torch.stack([masters[fqn].grad.double().norm() for fqn in trained]).norm()
        for fqn in trained:
            masters[fqn].grad *= min(1.0, 0.5 / (norm.item() + 1e-6))
        optimizer.step()
        for fqn in trained:
            reference.get_parameter(fqn).data.copy_(masters[fqn])
            reference.get_parameter(fqn).grad = None
    for fqn in trained:
        near = {"rtol": 0.02, "atol": 2e-3} if case.world > 1 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(safe_get_full_fp32_param(model.get_parameter(fqn)), masters[fqn].float(), **near)


@everywhere
@stages
def test_a_double_model_stays_double(stage: int) -> None:
    case = here(stage, extra={}, accumulation=2, clip=0.1)
    model, reference = odd().double(), odd().double()
    data = batches(3, size=case.global_batch)
    engine_run(start(model, case), case, data)
    plain_run(reference, case, data, optimizer=foreach(reference.parameters()))
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, rtol=1e-12, atol=1e-12)


# --- how gradients are summed -----------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
@stages
@pytest.mark.parametrize("accumulation", [1, 2])
def test_prescaling_changes_where_not_what(stage: int, accumulation: int) -> None:
    extra = {"prescale_gradients": True, "gradient_predivide_factor": 4.0}
    case = here(stage, extra=extra, accumulation=accumulation, clip=0.5)
    model, reference = odd(), odd()
    data = batches(3, size=case.global_batch)
    engine_run(start(model, case), case, data)
    plain_run(reference, case, data, optimizer=foreach(reference.parameters()))
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.world_size(2)
@stages
def test_a_sum_over_ranks_is_not_divided_by_them(stage: int) -> None:
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    case = here(stage, extra={"gradient_allreduce_op": "sum"} | sgd, accumulation=2)
    model, reference = odd(), odd()
    data = batches(2, size=case.global_batch)
    engine_run(start(model, case), case, data)
    plain_run(reference, case, data, optimizer=torch.optim.SGD(reference.parameters(), lr=0.1 * case.world))
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, rtol=1e-5, atol=1e-6)


# --- what the user changes between steps ------------------------------------------------------------------------------

Change = Callable[[nn.Module], None]


def _load(module: nn.Module) -> None:
    module.load_state_dict({key: value * 2 for key, value in module.state_dict().items()})


@torch.no_grad()
def _clamp(module: nn.Module) -> None:
    for param in module.parameters():
        param.clamp_(-0.05, 0.05)


@torch.no_grad()
def _swap_and_back(module: nn.Module) -> None:
    kept = {fqn: p.detach().clone() for fqn, p in module.named_parameters()}
    for param in module.parameters():
        param.data.copy_(torch.zeros_like(param))
    for fqn, param in module.named_parameters():
        param.data.copy_(kept[fqn])


def _swap_data_and_back(module: nn.Module) -> None:
    kept = {fqn: p.data for fqn, p in module.named_parameters()}
    for param in module.parameters():
        param.data = torch.zeros_like(param)
    for fqn, param in module.named_parameters():
        param.data = kept[fqn]


def _replace(module: nn.Module) -> None:
    for param in module.parameters():
        param.data = param.data * 3


@torch.no_grad()
def _few(module: nn.Module) -> None:
    module.embed.weight[3, 2:5] = 7.0
    module.gain.fill_(0.5)


CHANGES: dict[str, Change] = {
    "load_state_dict": _load,
    "clamp": _clamp,
    "swap and back": _swap_and_back,
    "swap .data and back": _swap_data_and_back,
    "replace .data": _replace,
    "a few elements": _few,
    "float and back": lambda module: module.float(),
    "double": lambda module: module.double(),
}
NEVER = {"swap and back", "swap .data and back", "float and back", "double"}
"""Nothing has changed in the end: the masters must be untouched to the bit."""


CHANGED = pairs((1, 2), (0, 1, 2, 3), ("fp32", "bf16", "fp16"), tuple(CHANGES))


@everywhere
def test_what_a_user_changes_is_what_trains(world_size: int) -> None:
    for stage, precision, name in beginning(world_size, CHANGED):
        with noted(stage, precision, name):
            changed_is_what_trains(stage, precision, name)


def changed_is_what_trains(stage: int, precision: str, name: str) -> None:
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    case = here(stage, extra=section | sgd)
    batch = batches(1, size=case.global_batch)
    model = odd()
    engine = start(model, case)
    engine_run(engine, case, batch)
    trained = {fqn: p for fqn, p in model.named_parameters() if p.requires_grad}
    dtypes = {fqn: p.dtype for fqn, p in trained.items()}
    masters = {fqn: safe_get_full_fp32_param(p) for fqn, p in trained.items()}
    with sheer.zero.GatheredParameters(model):
        shown = {fqn: p.detach().clone() for fqn, p in trained.items()}
        CHANGES[name](model)
        wanted = {fqn: p.detach().clone() for fqn, p in trained.items()}
    engine_run(engine, case, batch)
    now = values(model)
    for fqn, param in trained.items():
        untouched = wanted[fqn].to(dtypes[fqn]) == shown[fqn]
        expected = torch.where(untouched, masters[fqn], wanted[fqn].float())
        assert torch.equal(safe_get_full_fp32_param(param), expected), fqn
        assert torch.equal(now[fqn], expected.to(dtypes[fqn])), fqn
        assert name not in NEVER or bool(untouched.all()), fqn
    engine.destroy()


@everywhere
@stages
def test_data_in_fp32_given_to_a_bf16_model_keeps_its_bits(stage: int) -> None:
    case = here(stage, extra={"bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}})
    model = odd()
    engine = start(model, case)
    engine_run(engine, case, batches(1, size=case.global_batch))
    torch.manual_seed(5)
    given = {fqn: torch.randn(p.shape) for fqn, p in model.named_parameters() if p.requires_grad}
    for fqn, value in given.items():
        model.get_parameter(fqn).data = value.clone()
    for fqn, value in given.items():
        assert torch.equal(safe_get_full_fp32_param(model.get_parameter(fqn)), value), fqn
        assert model.get_parameter(fqn).dtype is torch.bfloat16
    engine_run(engine, case, batches(1, size=case.global_batch))
    for fqn, value in given.items():
        assert torch.equal(safe_get_full_fp32_param(model.get_parameter(fqn)), value), fqn


def test_a_transposed_view_of_itself() -> None:
    """It has the address that it had."""
    model = nn.Linear(4, 4, bias=False)
    engine = start(model, Case(extra={"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}))
    wanted = model.weight.detach().clone().t()
    model.weight.data = model.weight.data.t()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert torch.equal(model.weight, wanted)
    assert model.weight.is_contiguous()


@everywhere
def test_another_shape_is_refused_by_name() -> None:
    case = here(1, extra={})
    model = odd()
    engine = start(model, case)
    engine_run(engine, case, batches(1, size=case.global_batch))
    model.never.data = torch.zeros(3)
    with pytest.raises(UsageError, match=r"'never' was given data of shape \(3,\).*\(7,\)"):
        engine_run(engine, case, batches(1, size=case.global_batch))


@everywhere
@stages
def test_changed_while_frozen(stage: int) -> None:
    case = here(stage, extra={"bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}})
    model = odd()
    engine = start(model, case)
    batch = batches(1, size=case.global_batch)
    weight, other = model.blocks[0].up.weight, model.blocks[0].down.weight
    kept = safe_get_full_fp32_param(other)
    engine_run(engine, case, batch)
    for param in (weight, other):
        param.requires_grad_(False)
    engine_run(engine, case, batch)
    with sheer.zero.GatheredParameters([weight]), torch.no_grad():
        weight[0] = 3.0
    for param in (weight, other):
        param.requires_grad_(True)
    engine_run(engine, case, batch)
    assert bool((safe_get_full_fp32_param(weight)[0] == 3.0).all())
    assert torch.equal(safe_get_full_fp32_param(other), kept)


def test_destroyed_engines_leave_the_users_values() -> None:
    model = odd()
    engine = start(model, Case(extra={"bf16": {"enabled": True}}))
    engine_run(engine, Case(), batches(1, size=2))
    before = copy.deepcopy(model.state_dict())
    engine.destroy()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert isinstance(model, Odd)
    adamw(model)


# --- batch norm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_batch_norm_keeps_its_precision_and_trains(precision: str, dtype: torch.dtype) -> None:
    """torch refuses low-precision weights beside fp32 statistics. Oracle: a model cast by hand, its norms left fp32."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 4, 1))

    model, hand = build(), build()
    for layer in hand:
        if not isinstance(layer, nn.BatchNorm2d):
            layer.to(dtype)
    optimizer = torch.optim.AdamW([hand[1].weight, hand[1].bias], lr=1e-2, foreach=True)
    config = {
        "train_batch_size": 8,
        precision: {"enabled": True, **({"loss_scale": 1} if precision == "fp16" else {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "foreach": True}},
    }
    engine = sheer.initialize(model=model, config=config)[0]
    x = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours, expected = engine(x), hand(x)
    assert torch.equal(ours, expected)
    engine.backward(ours.float().square().mean())
    expected.float().square().mean().backward()
    engine.step()
    optimizer.step()
    assert [p.dtype for p in model.parameters()] == [dtype, dtype, torch.float32, torch.float32, dtype, dtype]
    torch.testing.assert_close(model[1].weight, hand[1].weight, rtol=0, atol=0)
    torch.testing.assert_close(model[1].bias, hand[1].bias, rtol=0, atol=0)
    assert torch.equal(model[1].running_mean, hand[1].running_mean)
