"""Failures in the middle leave the engine usable; its end leaves nothing behind."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import sheer
import sheer.testing
from sheer.comm import bonds
from sheer.errors import CommError, SheerError, UsageError
from tests.engine.models import Block, batches, odd
from tests.engine.oracle import Case, assert_same_model, start, values
from tests.engine.test_backward import SGD, TOLERANCE, here, ours, plain
from tests.harness import fresh
from tests.pairs import beginning, noted, pairs

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
BF16 = {"bf16": {"enabled": True}}
BUFFERS = ("full", "master", "gradient")
MORE = {"fp32": {}, "bf16": BF16, "compiled": {"compile": {"enabled": True, "backend": "aot_eager"}}}


def once(call: Any, module: Any, tokens: torch.Tensor, back: Callable[..., None]) -> None:
    back(call(tokens))


# --- failures ---------------------------------------------------------------------------------------------------------


class Bomb:
    """A gradient hook that raises when it is armed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.error: BaseException | None = None
        tensor.register_hook(self)

    def __call__(self, _grad: torch.Tensor) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def seen_to_fail(world: int, stage: int, way: str, where: str) -> bool:
    """By `module.forward` the engine hears of a backward by its gradients only: the last one fails, others came."""
    return way != "module" or where == "embed.weight"


FAILING = pairs(
    (1, 2),
    (0, 1, 2, 3),
    ("engine", "output", "module"),
    ("gain", "blocks.1.up.weight", "embed.weight"),
    allowed=seen_to_fail,
)


@pytest.mark.world_size(1, 2)
def test_a_backward_that_fails(world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Before, between and after buckets were launched; the step is forgotten, said, and the next one is right."""
    for stage, way, where in beginning(world_size, FAILING):
        caplog.clear()
        with noted(stage, way, where):
            goes_on_after_a_backward_that_fails(stage, way, where, caplog)


def goes_on_after_a_backward_that_fails(stage: int, way: str, where: str, caplog: pytest.LogCaptureFixture) -> None:
    case = here(stage=stage, accumulation=2, clip=0.5)
    model, reference = odd(), odd()
    bomb = Bomb(model.get_parameter(where))
    data = batches(4, size=case.global_batch)
    engine, optimizer = start(model, case), torch.optim.SGD(reference.parameters(), **SGD)
    call = engine.module if way == "module" else engine
    back = engine.backward if way == "engine" else torch.Tensor.backward
    for number, batch in enumerate(data):
        mine = [ranks[case.rank] for ranks in case.micro_batches(batch)]
        kind = (RuntimeError, KeyboardInterrupt)[number % 2]
        if number < 2:  # fails in the second micro-batch, at the boundary
            back(call(mine[0]))
            engine.step()
        bomb.error = kind("out of luck")
        with pytest.raises(kind, match="out of luck"):
            back(call(mine[1]))
        if way == "module":  # nobody but the step sees it
            with pytest.raises(UsageError, match="step after a backward that failed"):
                engine.step()
        ours(engine, case, [batch], once, way=way)
    said = [record.getMessage() for record in caplog.records if "the gradients of this step" in record.getMessage()]
    assert len(said) == len(data) * (case.rank == 0)
    plain(reference, case, data, once, optimizer=optimizer)
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, **TOLERANCE)


@pytest.mark.world_size(2)
@STAGES
def test_a_forward_that_fails(stage: int) -> None:
    """Nothing is lost: the micro-batch can be tried again."""
    case = here(stage=stage, accumulation=2)
    model, reference = odd(), odd()
    data = batches(2, size=case.global_batch)
    engine = start(model, case)
    for batch in data:
        for ranks in case.micro_batches(batch):
            handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine(ranks[case.rank])
            handle.remove()
            engine.backward(engine(ranks[case.rank]))
            engine.step()
    plain(reference, case, data, once)
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, **TOLERANCE)


@pytest.mark.world_size(2)
@STAGES
def test_a_step_after_a_failed_backward_is_refused(stage: int) -> None:
    case = here(stage=stage)
    model = odd()
    engine = start(model, case)
    batch = batches(1, size=2)[0]
    bomb = Bomb(model.blocks[0].up.weight)
    bomb.error = RuntimeError("out of luck")
    before = values(model)["gain"]
    with pytest.raises(RuntimeError, match="out of luck"):
        engine(batch).backward()
    with pytest.raises(UsageError, match="step after a backward that failed"):
        engine.step()
    assert values(model)["gain"] == before
    ours(engine, case, batches(1, size=case.global_batch), once)
    assert engine.global_steps == 1


def dying_peer(rank: int, stage: int, when: str, result: Any) -> None:
    """One of two processes; the second is gone in the middle of a step."""
    bonds.PATIENCE = 0.5
    case = Case(stage=stage, world=2, rank=rank)
    model = odd()
    engine = start(model, case)
    batch = batches(1, size=2)[0]
    ours(engine, case, batches(1, size=case.global_batch), once)
    if rank == 1 and when == "forward":
        model.blocks[1].register_forward_pre_hook(lambda *_: os._exit(1))
    if rank == 1 and when == "backward":
        model.blocks[1].up.weight.register_hook(lambda _: os._exit(1))
    try:
        loss = engine(batch)
        engine.backward(loss)
        if rank == 1:
            os._exit(1)
        engine.step()
        result.put("finished")
    except BaseException as error:
        result.put((type(error).__name__, str(error)))
    try:
        engine.destroy()
        model(batch).backward()
        result.put("usable" if torch.isfinite(model.gain.grad) else "broken")
    except BaseException as error:
        result.put((type(error).__name__, str(error)))


@pytest.mark.parametrize(("stage", "when"), [(1, "step"), (2, "backward"), (3, "forward")])
def test_the_death_of_a_rank_is_an_error_on_the_others(stage: int, when: str) -> None:
    with fresh.ranks(dying_peer, 2, stage, when) as (_, results):
        kind, message = results[0].get(timeout=120)
        after = results[0].get(timeout=120)
    assert kind == CommError.__name__, message
    assert "Of 2 ranks, 1 did not fail too within 0.5 s: look there. A peer has failed" in message
    # Where parameters are sharded the dead rank has taken its part with it.
    assert after == "usable" if stage < 3 else after[0] == CommError.__name__ and "Load a checkpoint" in after[1]


def engines_in_a_row(rank: int, result: Any) -> None:
    """One of two processes; nobody but `initialize` makes a process group."""
    case = Case(stage=2, world=2, rank=rank)
    kept = start(odd(), case)
    for _ in range(3):
        engine = start(odd(), case)
        ours(engine, case, batches(1, size=case.global_batch), once)
        engine.destroy()
    ours(kept, case, batches(1, size=case.global_batch), once)
    result.put(kept.global_steps)


def test_engines_may_follow_one_another_and_an_older_one_goes_on() -> None:
    with fresh.ranks(engines_in_a_row, 2) as (peers, results):
        assert [result.get(timeout=120) for result in results] == [1, 1]
        for peer in peers:
            peer.join(timeout=120)
        assert [peer.exitcode for peer in peers] == [0, 0]


# --- the end ----------------------------------------------------------------------------------------------------------


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def watched(engine: Any) -> dict[str, weakref.ref[Any]]:
    """What must be gone when an engine is."""
    runtime = engine._plan.runtime
    kept = {"engine": engine, "runtime": runtime, "arena": runtime.arena, "optimizer": engine.optimizer}
    for grad in runtime.grads:
        kept[f"full {grad.flat.plan.index}"] = grad.flat.full.untyped_storage()
        kept[f"master {grad.flat.plan.index}"] = grad.flat.master.untyped_storage()
        kept[f"gradient {grad.flat.plan.index}"] = grad.owned().untyped_storage()
    return {name: weakref.ref(thing) for name, thing in kept.items()}


def assert_gone(things: dict[str, weakref.ref[Any]]) -> None:
    patience = 100  # gloo's own threads let go of a collective a moment after it is done
    while any(ref() is not None for ref in things.values()) and patience:
        time.sleep(0.01)
        patience -= 1
    assert [name for name, ref in things.items() if ref() is not None] == []


def leaves_its_module(world: int, stage: int, more: str, end: str) -> bool:
    """Dropped on two ranks at stage 3, the module keeps the values, see below."""
    return (world, stage, end) != (2, 3, "drop")


ENDS = pairs((1, 2), (0, 1, 2, 3), tuple(MORE), ("destroy", "drop"), allowed=leaves_its_module)


@pytest.mark.world_size(1, 2)
def test_nothing_survives_an_engine(world_size: int) -> None:
    """Without help of the cyclic garbage collector; destroyed, even while the user still holds the engine."""
    for stage, more, end in beginning(world_size, ENDS):
        with noted(stage, more, end):
            assert_nothing_survives(stage, MORE[more], end)


def assert_nothing_survives(stage: int, more: dict[str, Any], end: str) -> None:
    case = here(stage=stage, accumulation=2)
    model = odd()
    engine = start(model, case, **more)
    ours(engine, case, batches(1, size=case.global_batch), once)
    engine.backward(engine(batches(1, size=2)[0]))  # in the middle of a step
    with without_collector():
        alive = watched(engine)
        if end == "destroy":
            engine.destroy()
            assert_gone({name: ref for name, ref in alive.items() if name.split()[0] in BUFFERS})
            del engine
        else:
            del engine
            model.zero_grad()  # what `.grad` shows is the module's own by now, and so are its parameters
            alive = {name: ref for name, ref in alive.items() if not name.startswith(("full", "master"))}
        assert_gone(alive)
    model(batches(1, size=2)[0]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(torch.isfinite(param).all() for param in model.parameters())


DESTROYED = pairs((1, 2), (0, 1, 2, 3), tuple(MORE))


@pytest.mark.world_size(1, 2)
def test_the_module_is_plain_after_destroy(world_size: int) -> None:
    for stage, more in beginning(world_size, DESTROYED):
        with noted(stage, more):
            assert_plain_after_destroy(stage, MORE[more])


def assert_plain_after_destroy(stage: int, more: dict[str, Any]) -> None:
    case = here(stage=stage)
    model, untouched = odd(), odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = [list(group["params"]) for group in optimizer.param_groups]
    engine = sheer.initialize(model=model, optimizer=optimizer, config=without_optimizer(case.config(**more)))[0]
    data = batches(2, size=case.global_batch)
    ours(engine, case, data[:1], once)
    expected = values(model)
    engine.destroy()
    engine.destroy()
    for (name, param), (_, other) in zip(model.named_parameters(), untouched.named_parameters(), strict=True):
        assert torch.equal(param, expected[name]), name
        assert param.grad is None, name
        assert not getattr(param, "_post_accumulate_grad_hooks", None), name
        assert param.grad_dtype == (param.dtype if other.grad_dtype is not None else None), name
        if param.numel():
            assert param.untyped_storage().nbytes() == param.nbytes, name
    for group, params in zip(optimizer.param_groups, given, strict=True):
        assert all(mine is theirs for mine, theirs in zip(group["params"], params, strict=True))
    model(batches(1, size=2)[0]).backward()
    optimizer.step()
    second = start(model, case, **more)
    ours(second, case, data[1:], once)
    assert second.global_steps == 1


def without_optimizer(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "optimizer"}


@pytest.mark.world_size(2)
@STAGES
def test_freezing_leaves_gradient_dtypes_as_they_were(stage: int) -> None:
    case = here(stage=stage)
    model = odd()
    engine = start(model, case, **BF16)
    data = batches(2, size=case.global_batch)
    ours(engine, case, data[:1], once)
    model.blocks[1].requires_grad_(False)
    ours(engine, case, data[1:], once)
    engine.destroy()
    model.requires_grad_(True)
    model(batches(1, size=2)[0]).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}


def test_a_destroyed_engine_says_so(tmp_path) -> None:
    engine = start(odd(), Case())
    batch = batches(1, size=2)[0]
    loss = engine(batch)
    engine.destroy()
    calls = {
        "forward": lambda: engine(batch),
        "backward": lambda: engine.backward(loss),
        "step": engine.step,
        "flush": engine.flush,
        "train_batch": lambda: engine.train_batch(iter([batch])),
        "zero_grad": engine.zero_grad,
        "optimizer.step": engine.optimizer.step,
        "no_sync": lambda: engine.no_sync().__enter__(),
        "save": lambda: engine.save_checkpoint(tmp_path),
        "load": lambda: engine.load_checkpoint(tmp_path),
        "set_train_batch_size": lambda: engine.set_train_batch_size(4),
        "flat_optimizer": engine.flat_optimizer,
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match="this engine was destroyed"):
            call()
        assert not list(tmp_path.iterdir()), name


@pytest.mark.world_size(2)
def test_a_dropped_engine_leaves_the_values_of_sharded_parameters_within_reach() -> None:
    case = here(stage=3)
    model = odd()
    engine = start(model, case)
    ours(engine, case, batches(1, size=case.global_batch), once)
    before = values(model)
    del engine
    assert torch.isfinite(model(batches(1, size=2)[0]))
    assert all(torch.equal(value, before[key]) for key, value in values(model).items() if key != "seen")
    with pytest.raises(UsageError, match="sharded by an engine that is gone"):
        start(model, case)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_dropped_engine_lets_go_of_its_module(stage: int) -> None:
    """Its optimizer handle says that it is gone; the module trains on by hand, and a second engine may have it."""
    case = here(stage=stage)
    model = odd()
    engine, handle, *_ = sheer.initialize(model=model, config=case.config())
    with pytest.raises(UsageError, match=r"already trained by an engine; call its destroy\(\)"):
        sheer.initialize(model=model, config=case.config())
    ours(engine, case, batches(1, size=case.global_batch), once)
    del engine
    with pytest.raises(UsageError, match="engine of this optimizer no longer exists"):
        handle.step()
    model(batches(1, size=2)[0]).backward()
    second = start(model, case)
    ours(second, case, batches(1, size=case.global_batch), once)
    assert second.global_steps == 1


# --- what cannot be trained -------------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("differs", "words"),
    [
        (lambda: nn.Linear(4, 4), r"parameter '.*' is .* on rank 0"),
        (lambda: nn.Sequential(Block(4), Block(4)), r"'.*' is .*absent"),
        (lambda: Block(4).double(), r"float64"),
        (lambda: Block(4).requires_grad_(False), r"False"),
        (lambda: Block(5), r"\(5,\)"),
    ],
    ids=["class", "depth", "dtype", "frozen", "shape"],
)
def test_ranks_with_different_models_all_hear_of_it(differs: Callable[[], nn.Module], words: str) -> None:
    case = here(stage=1)
    module = differs() if case.rank == 1 else Block(4)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(UsageError, match=f"(?s)comparing the model of all ranks.*rank 1: UsageError: .*{words}"):
        start(module, case)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    start(Block(4), case)  # and nobody is left waiting


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["meta", "foreign", "overlap"])
def test_a_model_that_one_rank_cannot_train_is_an_error_on_all(kind: str) -> None:
    case = here(stage=2)
    module, optimizer = Block(4), None
    if case.rank == 1:
        if kind == "meta":
            module = module.to("meta")
        elif kind == "overlap":
            module.norm.bias = nn.Parameter(module.norm.weight.data)
    if kind == "foreign":
        optimizer = torch.optim.SGD((Block(4) if case.rank == 1 else module).parameters(), lr=0.1)
    with pytest.raises(SheerError) as caught:
        sheer.initialize(model=module, optimizer=optimizer, config=case.config())
    words = {"meta": "meta device", "overlap": "same memory", "foreign": "not a parameter of the model"}[kind]
    assert "rank 1" in str(caught.value)
    assert words in str(caught.value)
    start(Block(4), case)
