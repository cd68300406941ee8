"""What travels, when and in which order; and that nothing is read, written or freed while it does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sheer
import sheer.testing
from sheer.comm import Ticket, data_axis
from sheer.zero.grads import BucketGrad, GradState
from sheer.zero.runtime import MAX_IN_FLIGHT
from tests.engine.models import Block, batches, odd
from tests.engine.oracle import assert_same_model, start, values
from tests.engine.test_backward import BODIES, SGD, TOLERANCE, Recomputed, here, ours, plain, seeded, two_losses
from tests.harness.host_sync import no_host_sync
from tests.harness.late_work import LeaseViolation, late_collectives
from tests.pairs import beginning, noted, pairs

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def once(call: Any, module: Any, tokens: torch.Tensor, back: Any) -> None:
    back(call(tokens))


def padded(engine: Any) -> int:
    """Elements of all trainable buckets, gaps and padding included."""
    return sum(bucket.numel for bucket in engine.layout.buckets if bucket.trainable)


def gathers(engine: Any, what: str, micro_batches: int) -> int:
    """Gathers of a step of `odd()` at stage 3, or their elements."""
    amount: Counter[str] = Counter()
    for bucket in engine.layout.buckets:
        amount[bucket.key.unit] += 1 if what == "count" else bucket.numel
    blocks = sum(count for unit, count in amount.items() if unit)
    return amount[""] + micro_batches * (2 * blocks - amount["blocks.2"])


def logged(engine: Any) -> list[Any]:
    engine.traffic.log = []
    return engine.traffic.log


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.world_size(2, 3)
@STAGES
def test_every_rank_communicates_in_one_order(stage: int) -> None:
    """Whatever parameters a rank uses and however late it is."""

    def body(call: Any, module: Any, tokens: torch.Tensor, back: Any) -> None:
        time.sleep(0.01 * ((case.rank + int(tokens.sum())) % 3))
        back(call(tokens, branch=case.rank == 1))
        back(call(tokens) if case.rank else module.gain * call(tokens).detach())

    case = here(stage=stage, accumulation=2)
    engine = start(odd(), case)
    log = logged(engine)
    ours(engine, case, batches(2, size=case.global_batch), body)
    everyone = data_axis().gather_objects([tuple(map(str, entry)) for entry in log])
    assert everyone[0]
    assert all(one == everyone[0] for one in everyone)


@pytest.mark.world_size(2, 3)
@STAGES
@pytest.mark.parametrize("accumulation", [1, 3])
def test_counts_and_bytes_are_those_of_theory(stage: int, accumulation: int) -> None:
    """Gradients travel once per window at stages 0 and 1, once per micro-batch at stages 2 and 3; with one micro-batch
    stages 0 to 2 move 2 x (n-1)/n of the padded parameters, and one small message besides. Stage 3 gathers a block
    twice per micro-batch, the last one once, and what is in no block once per step."""
    case = here(stage=stage, accumulation=accumulation)
    engine = start(odd(), case)
    buckets = sum(bucket.trainable for bucket in engine.layout.buckets)
    log = logged(engine)
    engine.traffic.bytes.clear()
    ours(engine, case, batches(1, size=case.global_batch), once)
    assert buckets >= 5
    expected = {
        0: Counter(all_reduce=buckets + 1),
        1: Counter(reduce_scatter=buckets, all_reduce=1, all_gather=buckets),
        2: Counter(reduce_scatter=buckets * accumulation, all_reduce=1, all_gather=buckets),
        3: Counter(
            reduce_scatter=buckets * accumulation, all_reduce=1, all_gather=gathers(engine, "count", accumulation)
        ),
    }
    assert Counter(entry.op for entry in log) == expected[stage]
    share = padded(engine) * 4 * (case.world - 1) // case.world
    message = (
        next(entry.numel for entry in log if entry.what == "step statistics") * 4 * 2 * (case.world - 1) // case.world
    )
    reductions = accumulation if stage >= 2 else 1
    parameters = padded(engine) if stage < 3 else gathers(engine, "numel", accumulation)
    gathered = parameters * 4 * (case.world - 1) // case.world
    assert sum(engine.traffic.bytes.values()) - message == share * reductions + gathered


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_reduction_starts_during_backward(stage: int) -> None:
    """When the first block's gradients come, most of the others' are under way."""
    case = here(stage=stage)
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(12) for _ in range(6)])
    engine = start(model, case)
    log, seen = logged(engine), []
    model[0].norm.weight.register_hook(lambda _: seen.append(len(log)))
    engine.backward(engine(torch.randn(2, 12)).square().mean())
    buckets = sum(bucket.trainable for bucket in engine.layout.buckets)
    assert buckets >= 6
    assert seen[0] >= buckets - 2
    assert len(log) == buckets
    engine.step()


@pytest.mark.world_size(2)
@STAGES
def test_a_replan_goes_on_counting(stage: int) -> None:
    case = here(stage=stage)
    engine = start(odd(), case)
    data = batches(2, size=case.global_batch)
    ours(engine, case, data[:1], once)
    before = sum(engine.traffic.collectives.values())
    engine.module.frozen.requires_grad_(True)
    ours(engine, case, data[1:], once)
    assert sum(engine.traffic.collectives.values()) > before > 0


# --- nothing is touched in flight -------------------------------------------------------------------------------------


BF16_WIRE = {"communication_data_type": "bf16"}
LATE = pairs((0, 1, 2, 3), BODIES, (1, 2), ({}, BF16_WIRE))


@pytest.mark.world_size(2)
@STAGES
def test_every_body_is_right_where_collectives_are_late(stage: int) -> None:
    for body, accumulation, precision in beginning(stage, LATE):
        case = here(stage=stage, accumulation=accumulation, clip=0.5)
        model, reference = odd(), odd()
        data = batches(2, size=case.global_batch)
        with noted(body.__name__, accumulation, precision):
            with late_collectives():
                engine = start(model, case, **precision)
                norms = ours(engine, case, data, body, way="output")
                state = values(model)
                engine.destroy()
            close = {"rtol": 2e-2, "atol": 2e-3} if precision else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(norms, plain(reference, case, data, body), **close)
            expected = reference.state_dict() | {"seen": state["seen"]}
            torch.testing.assert_close(state, expected, **close)


@pytest.mark.world_size(2)
@STAGES
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_right_where_collectives_are_late(stage: int, reentrant: bool) -> None:
    case = here(stage=stage, accumulation=2)
    model, reference = (seeded(lambda: Recomputed(reentrant=reentrant)) for _ in range(2))
    data = batches(2, size=case.global_batch)
    with late_collectives():
        engine = start(model, case)
        ours(engine, case, data, two_losses, way="output")
        engine.destroy()
    plain(reference, case, data, two_losses)
    assert_same_model(model, reference, **TOLERANCE)


def scale_early(grad: BucketGrad) -> None:
    """Write to what a lane holds."""
    if grad.state is GradState.IN_FLIGHT:
        grad.owned().mul_(0.5)


def settle_early(grad: BucketGrad) -> None:
    """Read what a lane has not brought yet."""
    if grad.state is GradState.IN_FLIGHT:
        grad._settle(grad._part)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("stage", "bug"), [(0, scale_early), (1, scale_early), (2, settle_early), (0, None), (1, None), (2, None)]
)
def test_a_seeded_bug_is_caught(stage: int, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would pass on gloo: work with a gradient under reduction, or never wait for it."""
    land = BucketGrad.land

    def land_too_late(grad: BucketGrad) -> None:
        bug(grad)
        land(grad)

    def forget_to_wait(ticket: Ticket) -> None:
        ticket.held = ()

    if bug is None:
        monkeypatch.setattr(Ticket, "wait", forget_to_wait)
    else:
        monkeypatch.setattr(BucketGrad, "land", land_too_late)
    case = here(stage=stage)
    data = batches(2, size=case.global_batch)
    caught = False
    try:
        with late_collectives():
            norms = ours(start(odd(), case), case, data, once)
            caught = norms != pytest.approx(plain(odd(), case, data, once))
    except LeaseViolation:
        caught = True
    assert caught


# --- what a step costs ------------------------------------------------------------------------------------------------


@contextmanager
def counted_operators() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.ops.aten.is_set_to.default:  # compares addresses; runs no kernel
                counts[str(func)] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        yield counts


@pytest.mark.world_size(1, 2)
@STAGES
def test_a_step_runs_as_many_operators_whatever_the_number_of_parameters(stage: int) -> None:
    def operators(layers: int) -> Counter[str]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)])
        config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.1}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
        engine = sheer.initialize(model=model, config=config)[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 16)).square().mean())
            with counted_operators() as counts:
                engine.step()
        engine.destroy()
        return counts

    assert operators(2) == operators(20)


@pytest.mark.world_size(2)
@STAGES
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_steady_step_never_waits_for_the_device(stage: int, accumulation: int) -> None:
    case = here(stage=stage, accumulation=accumulation, clip=0.5)
    torch.manual_seed(0)
    engine = start(nn.Sequential(Block(12), Block(12)), case)

    def run() -> None:
        for _ in range(accumulation):
            engine.backward(engine(torch.ones(2, 12)).square().mean())
            engine.backward(engine(torch.ones(2, 12)).square().mean())
            engine.step()

    run()
    with no_host_sync():
        run()
    assert engine.global_steps == 2


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("stage", "leased"), [(0, 0), (1, 0), (2, 1 + MAX_IN_FLIGHT)])
@pytest.mark.parametrize("wire", [{}, BF16_WIRE], ids=["fp32", "bf16 wire"])
def test_leased_buffers_are_few_and_come_back(stage: int, leased: int, wire: dict[str, Any]) -> None:
    """At stage 2 those that travel and the one that fills; gloo receives as much as travels, or copies travel."""
    case = here(stage=stage, accumulation=2)
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(12) for _ in range(8)])
    engine = start(model, case, **wire)
    arena = engine._runtime.arena
    largest = max(bucket.numel for bucket in engine.layout.buckets) * 4
    assert padded(engine) * 4 > 8 * largest
    for _ in range(3):
        for _ in range(2):
            engine.backward(engine(torch.randn(2, 12)).square().mean())
            engine.step()
        assert arena.live == 0
    besides = MAX_IN_FLIGHT if stage or wire else 0
    assert arena.peak <= (leased + besides) * largest


@pytest.mark.world_size(2)
@STAGES
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_gaps_and_padding_are_zero_after_every_phase(stage: int, precision: dict[str, Any]) -> None:
    case = here(stage=stage, accumulation=2, clip=0.5)
    model = odd()
    engine = start(model, case, **precision)

    def check(phase: str) -> None:
        for grad in engine._runtime.grads:
            grad.land()
            plan, owned = grad.flat.plan, grad.flat.owned
            filled = torch.zeros(plan.numel, dtype=torch.bool)
            for slot in plan.slots:
                filled[slot.start : slot.stop] = True
            buffers = {"own": (grad.flat.own, owned.start), "master": (grad.flat.master, owned.start)}
            if grad.flat.full.untyped_storage().nbytes():
                buffers["full"] = (grad.flat.full, 0)
            buffers["gradient"] = (grad.counted(), grad.shard.start)
            if grad._local is not None:
                buffers["local"] = (grad._local, 0)
            for name, (buffer, start_) in buffers.items():
                empty = ~filled[start_ : start_ + buffer.numel()]
                assert not buffer[empty].count_nonzero(), (phase, name, plan.index)

    check("start")
    for _ in range(2):
        for number in range(2):
            loss = engine(batches(1, size=2)[0], branch=True)
            check("forward")
            engine.backward(loss)
            check(f"backward {number}")
            engine.step()
            check(f"step {number}")


@STAGES
def test_a_step_that_was_not_a_number_leaves_nothing_behind(stage: int) -> None:
    """After loading good weights again, gaps must not hold what the bad step put everywhere."""
    case = here(stage=stage, clip=0.5)
    model, reference = odd(), odd()
    engine = start(model, case)
    good = {key: value.clone() for key, value in model.state_dict().items()}
    data = batches(2, size=case.global_batch)
    engine.optimizer.param_groups[0]["momentum"] = 0.0
    ours(engine, case, data[:1], lambda call, module, tokens, back: back(call(tokens) * float("nan")))
    model.load_state_dict(good)
    norms = ours(engine, case, data[1:], once)
    optimizer = torch.optim.SGD(reference.parameters(), **(SGD | {"momentum": 0.0}))
    torch.testing.assert_close(norms, plain(reference, case, data[1:], once, optimizer=optimizer))
    model.seen.copy_(reference.seen)
    assert_same_model(model, reference, **TOLERANCE)
