"""What a steady step costs, in counts that do not depend on the machine: Python calls, operators, bytes allocated."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import sheer
from sheer import layout as layouts
from sheer.zero.runtime import MAX_IN_FLIGHT

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
SOURCE = str(Path(sheer.__file__).parent)


def start(model: nn.Module, *, stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **more},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "compile": {"enabled": False},
    }
    return sheer.initialize(model=model, config=config)[0]


def calls_of_ours(work: Callable[[], object]) -> int:
    """Calls of Python functions of `sheer` while `work` runs."""
    count = 0

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(SOURCE)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


class Calls(NamedTuple):
    backward: int
    step: int


def calls_per_step(tensors: int, *, stage: int) -> Calls:
    """A model of many small tensors that fill one bucket."""
    torch.manual_seed(0)
    engine = start(nn.Sequential(*[nn.Linear(2, 2) for _ in range(tensors // 2)]), stage=stage)
    assert len(engine.layout.buckets) == 1
    batch = torch.ones(2, 2)
    for _ in range(2):
        loss = engine(batch).square().mean()
        backward = calls_of_ours(lambda loss=loss: engine.backward(loss))
        step = calls_of_ours(engine.step)
    engine.destroy()
    return Calls(backward, step)


@pytest.mark.world_size(1, 2)
@STAGES
def test_python_calls_do_not_grow_with_parameters_but_for_the_hook(stage: int) -> None:
    few, more, many = (calls_per_step(tensors, stage=stage) for tensors in (10, 100, 1000))
    assert few.step == more.step == many.step
    per_tensor = (many.backward - more.backward) / 900
    assert per_tensor == (more.backward - few.backward) / 90
    assert per_tensor <= 3  # the hook, the countdown, and a look at the gradient


@pytest.mark.world_size(2)
@STAGES
def test_python_calls_are_linear_in_buckets(stage: int) -> None:
    def calls(buckets: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(buckets)])
        engine = start(model, stage=stage, reduce_bucket_size=384)
        assert len(engine.layout.buckets) == buckets
        for _ in range(2):
            loss = engine(torch.ones(2, 16)).square().mean()
            count = calls_of_ours(lambda loss=loss: (engine.backward(loss), engine.step()))
        engine.destroy()
        return count

    four, eight, sixteen = (calls(buckets) for buckets in (4, 8, 16))
    assert sixteen - eight == 2 * (eight - four)


VIEWS = {"aten.detach.default", "aten.split_with_sizes.default", "aten.view.default", "aten.is_set_to.default"}


def operators_of_backward(run: Callable[[], object]) -> Counter[str]:
    """Operators that do work, as many as `run` dispatches."""
    counts: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[str(func)] += str(func) not in VIEWS
            return func(*args, **(kwargs or {}))

    with Counting():
        run()
    return +counts


@pytest.mark.world_size(1, 2)
@STAGES
def test_the_engine_adds_as_many_operators_to_a_backward_whatever_the_number_of_parameters(stage: int) -> None:
    def added(layers: int) -> Counter[str]:
        torch.manual_seed(0)
        model, plain = (nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)]) for _ in range(2))
        engine = start(model, stage=stage)
        for _ in range(2):
            loss = engine(torch.ones(2, 16)).square().mean()
            ours = operators_of_backward(lambda loss=loss: engine.backward(loss))
            engine.step()
        loss = plain(torch.ones(2, 16)).square().mean()
        theirs = operators_of_backward(loss.backward)
        engine.destroy()
        return ours - theirs

    assert added(2) == added(20)


# --- memory -----------------------------------------------------------------------------------------------------------


def allocations(run: Callable[[], object]) -> list[int]:
    """Bytes that torch's CPU allocator gives (positive) and takes back (negative), in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


@pytest.mark.world_size(1, 2)
@STAGES
def test_a_steady_step_allocates_nothing_of_the_size_of_a_bucket(stage: int) -> None:
    torch.manual_seed(0)
    engine = start(nn.Sequential(*[nn.Linear(64, 64) for _ in range(16)]), stage=stage)
    (bucket,) = engine.layout.buckets

    def step() -> None:
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()

    step()
    step()
    assert max(allocations(step)) < bucket.numel * 4 / 8
    engine.destroy()


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("stage", "buckets"), [(0, 1), (1, 1 + MAX_IN_FLIGHT), (2, 2 + 2 * MAX_IN_FLIGHT)])
def test_memory_beside_the_state_is_bounded_by_the_bucket_size(stage: int, buckets: int) -> None:
    """The gradients of one bucket as autograd makes them; and besides, what the arena leases."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(32)])
    engine = start(model, stage=stage, reduce_bucket_size=2 * (64 * 64 + 128))
    assert len(engine.layout.buckets) == 16
    size = engine.layout.buckets[0].numel * 4

    def step() -> None:
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()

    step()
    step()
    idle = engine._runtime.arena.idle
    peak = max(accumulate(allocations(step)))
    assert 0 < peak + idle < (buckets + 0.5) * size  # half of one for activations and small change
    engine.destroy()


# --- planning ---------------------------------------------------------------------------------------------------------


def test_planning_is_linear_and_needs_no_process_group() -> None:
    """For 1024 ranks; the number of calls stands for the time."""

    def calls(parameters: int) -> int:
        shape = (64, 64)
        specs = [layouts.ParamSpec(f"layers.{i}", shape, torch.float32, torch.float32, 0) for i in range(parameters)]

        def plan() -> None:
            layout = layouts.plan(specs, stage=layouts.STAGES[2], world=1024, limit=2**20)
            assert sum(len(bucket.slots) for bucket in layout.buckets) == parameters

        return calls_of_ours(plan)

    thousand, ten_thousand = calls(1000), calls(10_000)
    assert ten_thousand <= 10 * thousand


# --- what is loaded ---------------------------------------------------------------------------------------------------

LOADED = """
import json, sys, torch
model = torch.nn.Linear(2, 2)
torch.optim.AdamW(model.parameters(), fused=True)  # torch loads dynamo here
before = set(sys.modules)
import sheer
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
sheer.initialize(model=model, config=config | {"compile": {"enabled": False}})
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_initialize_loads_little_beyond_what_a_plain_loop_does() -> None:
    """No backend of dynamo's, no progress bar, no monitor."""
    command = [sys.executable, "-W", "error", "-c", LOADED]
    added = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=110).stdout)
    packages = {name.partition(".")[0] for name in added} - set(sys.stdlib_module_names)
    allowed = {"pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions"}
    assert packages <= {"sheer", "torch", "safetensors"} | allowed
    assert not [name for name in added if name.startswith(("torch._inductor", "torch._dynamo"))]
