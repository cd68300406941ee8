"""Masters, optimizer state and sharded parameters that rest on the host or in files: the same training, to the bit."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sheer
import sheer.testing
from sheer.comm import Copy, HostMemory
from sheer.errors import ConfigError, UsageError
from sheer.layout import Place, Placement
from sheer.optim.lion import Lion
from sheer.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from sheer.zero.grads import GradState
from tests.engine import stages
from tests.engine.models import Odd, batches, odd
from tests.engine.oracle import Case, engine_run, start, values
from tests.harness.late_work import late_collectives
from tests.harness.second_device import DEVICE, second_device
from tests.pairs import beginning, noted, pairs

LOW = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}},
}
"""fp16 begins with steps that are skipped."""
Run = tuple[list[Any], dict[str, torch.Tensor]]


def here(stage: int, **fields: Any) -> Case:
    return Case(stage, sheer.testing.world_size(), sheer.testing.rank(), **fields)


def offloaded(case: Case, folder: Path, *, optim: str, param: str = "none") -> Case:
    return case._replace(
        offload={
            "offload_optimizer": {"device": optim, "nvme_path": str(folder)},
            "offload_param": {"device": param, "nvme_path": str(folder)},
        }
    )


def branching(module: Any, tokens: torch.Tensor, rank: int, number: int) -> torch.Tensor:
    return module(tokens, branch=rank == 0 and number == 0)


def trained(case: Case, *, make: Any = None, between: Callable[[Any, int], None] = lambda engine, step: None) -> Run:
    """Steps that use all parameters on some rank, or leave some out, and what became of the model."""
    model = odd()
    given = None if make is None else make(model.parameters())
    engine = sheer.initialize(model=model, optimizer=given, config=case.config())[0]
    results = []
    for step, batch in enumerate(batches(3, size=case.global_batch)):
        between(engine, step)
        results += engine_run(engine, case, [batch], **({} if step else {"call": branching}))
    state = values(model)
    engine.destroy()
    return results, state


def assert_same(mine: Run, theirs: Run) -> None:
    assert str(mine[0]) == str(theirs[0])  # a skipped step has no number for a norm
    for fqn, value in theirs[1].items():
        assert torch.equal(mine[1][fqn], value), fqn


def sharded_at_3_only(world: int, stage: int, setting: Any, places: tuple[str, str]) -> bool:
    return (places[1] != "none") == (stage == 3)


SETTINGS = ((1, 0.5, "fp32"), (2, 0.0, "bf16"), (2, 0.5, "fp16"))
REST = (("cpu", "none"), ("nvme", "none"), ("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme"), ("nvme", "cpu"))
RESTING = pairs((1, 2), (0, 1, 2, 3), SETTINGS, REST, allowed=sharded_at_3_only)


@pytest.mark.world_size(1, 2)
def test_training_is_the_same_to_the_bit(world_size: int, tmp_path: Path) -> None:
    for stage, (accumulation, clip, precision), (optim, param) in beginning(world_size, RESTING):
        with noted(stage, precision, optim, param):
            case = here(stage, accumulation=accumulation, clip=clip, extra=LOW[precision])
            expected = trained(case)
            if stage == 3 and case.world == 1:  # gathered by block, which it would not be otherwise: other buckets
                one = trained(offloaded(case, tmp_path, optim="none", param="nvme"))
                assert_close(one, expected, precision)
                expected = one
            assert_same(trained(offloaded(case, tmp_path, optim=optim, param=param)), expected)
    assert not list(tmp_path.iterdir())


def assert_close(mine: Run, theirs: Run, precision: str) -> None:
    near = 1e-5 if precision == "fp32" else 2**-7
    torch.testing.assert_close(torch.tensor(mine[0]), torch.tensor(theirs[0]), rtol=near, atol=near, equal_nan=True)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, foreach=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "Lion": lambda params: Lion(params, lr=1e-3),
    "hooked": lambda params: hooked(params),
}


def hooked(params: Any) -> torch.optim.Optimizer:
    """It must step once for all, so that all of its state is made at the same time."""
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.world_size(2)
def test_every_optimizer_that_works_on_flat_shards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        case = here(1 + number % 3)
        expected = trained(case, make=make)
        for optim in ("cpu", "nvme"):
            assert_same(trained(offloaded(case, tmp_path, optim=optim), make=make), expected)
            told = "has to step once for all buckets" in caplog.text
            assert told == (name == "hooked" and optim == "nvme" and case.rank == 0)


def meddling(engine: Any, step: int) -> None:
    """What users do between steps: change values in place, replace data, freeze and unfreeze, look and set."""
    params = dict(engine.module.named_parameters())
    with sheer.zero.GatheredParameters(engine.module), torch.no_grad():
        params["gain"].mul_(1.01)
        params["blocks.0.up.weight"].data.clamp_(-0.1, 0.1)
        params["blocks.1.up.weight"].data = params["blocks.1.up.weight"].data * 0.5
    params["blocks.2.up.weight"].requires_grad_(step != 1)
    moved = params["blocks.0.down.weight"]
    if step:
        safe_set_full_fp32_param(moved, safe_get_full_fp32_param(moved) + 1)
        moment = safe_get_full_optimizer_state(moved, "exp_avg")
        safe_set_full_optimizer_state(moved, moment * 2, "exp_avg")
    assert safe_get_full_grad(moved) is None


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_users_do_between_steps(stage: int, tmp_path: Path) -> None:
    case = here(stage, extra=LOW["bf16" if stage == 2 else "fp32"])
    expected = trained(case, between=meddling)
    assert_same(trained(offloaded(case, tmp_path, optim="cpu"), between=meddling), expected)
    param = "nvme" if stage == 3 else "none"
    assert_same(trained(offloaded(case, tmp_path, optim="nvme", param=param), between=meddling), expected)


class LateCopy(Copy):
    """A copy that has not happened until it must have; meanwhile its result reads as NaN."""

    pending = 0

    def __init__(self, target: torch.Tensor, source: torch.Tensor, then: Callable[[], object] | None = None) -> None:
        self._target, self._source, self._last = target, source, then
        self._launched = source.clone()
        target.fill_(float("nan"))
        self._left = self._waited = False
        LateCopy.pending += 1
        assert LateCopy.pending <= 2 + 1, "more copies under way than buffers in flight"

    @property
    def done(self) -> bool:
        return self._waited

    def leave(self) -> None:
        if not self._left:
            assert torch.equal(self._source, self._launched), "the source was written before the copy had left it"
            self._left = True
            LateCopy.pending -= 1

    def wait(self) -> None:
        self.leave()
        if not self._waited:
            self._waited = True
            self._target.copy_(self._launched)
            if self._last is not None:
                self._last()


def copy_late(memory: HostMemory, target: torch.Tensor, source: torch.Tensor) -> Copy:
    return LateCopy(target, source)


def add_late(memory: HostMemory, target: torch.Tensor, source: torch.Tensor) -> Copy:
    arriving = torch.empty_like(source)
    return LateCopy(arriving, source, lambda: target.add_(arriving))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_are_late_on_the_host(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that copies beside its computation. (Buckets whose copies are under way are bounded.)"""
    case = here(stage, accumulation=3, clip=0.5, extra=LOW["bf16"])
    expected = trained(case)
    monkeypatch.setattr(HostMemory, "take", copy_late)
    monkeypatch.setattr(HostMemory, "add", add_late)
    with late_collectives():
        mine = trained(offloaded(case, tmp_path, optim="cpu"))
    assert_same(mine, expected)
    assert LateCopy.pending == 0


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_read_before_it_has_arrived(stage: int, tmp_path: Path) -> None:
    case = here(stage, accumulation=2, extra=LOW["bf16"])
    away = offloaded(case, tmp_path, optim="cpu", param="cpu" if stage == 3 else "none")
    expected = trained(case)
    with late_collectives():
        mine = trained(away)
    assert_same(mine, expected)


@pytest.mark.world_size(2)
def test_a_model_built_in_shards_rests_in_files(tmp_path: Path) -> None:
    case = offloaded(here(3), tmp_path, optim="nvme", param="nvme")
    expected = trained(case)
    torch.manual_seed(0)
    with sheer.zero.Init():
        model = Odd()
    engine = start(model, case)
    batch, *others = batches(3, size=case.global_batch)
    results = engine_run(engine, case, [batch], call=branching) + engine_run(engine, case, others)
    assert_same((results, values(model)), expected)
    engine.destroy()


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("stage", "optim", "param"), [(0, "nvme", "none"), (2, "cpu", "none"), (3, "nvme", "cpu")])
def test_stages_of_a_pipeline_that_share_a_parameter(stage: int, optim: str, param: str, tmp_path: Path) -> None:
    case = offloaded(stages.case_of(2, stage=stage, accumulation=3, clip=0.5), tmp_path, optim=optim, param=param)
    engine = start(stages.staged(2), case)
    stages.assert_trains_as_plain(engine, case)
    engine.destroy()


class Affine(torch.nn.Module):
    """Its parameters are on the device from the start, and no generator is asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 8, device=DEVICE))
        self.bias = torch.nn.Parameter(torch.zeros(8, device=DEVICE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


def on_a_device(stage: int, precision: str, *, optim: str, param: str = "none") -> Any:
    """An engine that trains on a device which is not the host."""
    case = offloaded(
        Case(stage, accumulation=2, clip=1.0, extra=LOW[precision]), Path("unused"), optim=optim, param=param
    )
    model = torch.nn.Sequential(Affine(), Affine(), Affine())
    options = {"type": "AdamW", "params": {"lr": 1e-3, "foreach": True}}
    return start(model, case, optimizer=options)


def step_of(engine: Any, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8, dtype=dtype, device=DEVICE)).square().mean())
        engine.step()


PLACES = [
    (0, "fp32", "none", "none"),
    (0, "bf16", "cpu", "none"),
    (1, "fp32", "cpu", "none"),
    (2, "bf16", "cpu", "none"),
    (3, "bf16", "cpu", "cpu"),
    (3, "fp32", "cpu", "cpu"),
    (3, "bf16", "none", "cpu"),
    (3, "fp32", "none", "cpu"),
]


@pytest.mark.parametrize(("stage", "precision", "optim", "param"), PLACES)
def test_on_a_device_that_is_not_the_host(stage: int, precision: str, optim: str, param: str) -> None:
    """Everything is where the layout says, and no operator meets tensors of two places."""
    with second_device():
        engine = on_a_device(stage, precision, optim=optim, param=param)
        for _ in range(2):
            step_of(engine, precision)
        at = {"none": DEVICE.type, "cpu": "cpu"}
        optimizer = engine.flat_optimizer()
        moments = [optimizer.base.state[run.tensor]["exp_avg"] for run in optimizer.runs]
        assert {tensor.device.type for tensor in [*moments, *(run.tensor for run in optimizer.runs)]} == {at[optim]}
        assert {param.device.type for param in engine.module.parameters()} == {DEVICE.type}
        kept = engine.layout.nbytes()
        flats, grads = engine._runtime.flats, engine._runtime.grads
        assert {flat.own.device.type for flat in flats} == {at[param]}
        assert {grad.owned().device.type for grad in grads} == {"cpu" if kept["grad"][0] is Place.HOST else DEVICE.type}
        assert kept["master"][1] == sum(flat.master.nbytes for flat in flats if flat.has_master)
        assert kept["param"][1] == sum((flat.own if param == "cpu" else flat.full).nbytes for flat in flats)
        engine.destroy()


KINDS = sheer.OffloadStateTypeEnum


def live_bytes(engine: Any, place: str) -> dict[str, int]:
    """What the engine's own tensors hold in one place, each storage once."""
    optimizer = engine.flat_optimizer()
    flats, grads = engine._runtime.flats, engine._runtime.grads
    kept = {
        "lp_params": [flat.own for flat in flats],
        "hp_params": [flat.master for flat in flats if flat.has_master],
        "optim_states": [optimizer.base.state[run.tensor][key] for run in optimizer.runs for key in MOMENTS],
        "lp_grads": [grad.owned() for grad in grads if grad.state is GradState.EMPTY and grad._local is not None]
        if engine.layout.stage.grad is not Placement.SHARDED
        else [grad.owned() for grad in grads],
    }
    return {kind: sum(t.nbytes for t in tensors if t.device.type == place) for kind, tensors in kept.items()}


MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    ("stage", "precision", "param"), [(0, "fp32", "none"), (2, "bf16", "none"), (3, "bf16", "cpu")]
)
def test_states_leave_the_device_and_come_back(stage: int, precision: str, param: str) -> None:
    with second_device():
        engine = on_a_device(stage, precision, optim="none", param=param)
        step_of(engine, precision)
        before = live_bytes(engine, DEVICE.type)
        engine.offload_states(include=[KINDS.optim_states, "hp_params"])
        engine.offload_states(include=["hp_params"])
        now = live_bytes(engine, DEVICE.type)
        assert now == {**before, "optim_states": 0, "hp_params": 0}
        assert live_bytes(engine, "cpu")["optim_states"] == before["optim_states"]
        # torch cannot turn a meta tensor into another one; test_a_rest_between_steps has whole parameters moved.
        engine.offload_states(include=set(KINDS) - ({KINDS.lp_params} if param == "none" else set()))
        now = live_bytes(engine, DEVICE.type)
        assert now == {**dict.fromkeys(now, 0), "lp_params": before["lp_params"]}
        engine.reload_states()
        assert live_bytes(engine, DEVICE.type) == before
        assert {tensor.device.type for tensor in engine.module.parameters()} == {DEVICE.type}
        step_of(engine, precision)
        engine.destroy()


def resting_between(engine: Any, step: int) -> None:
    """What a loop does that generates between steps."""
    engine.offload_states(include=None if step else ["optim_states"])
    with pytest.raises(UsageError, match=r"optim_states are offloaded .*: call engine\.reload_states\(\) first"):
        engine.step()
    with pytest.raises(UsageError, match="optim_states"):
        engine(torch.zeros(2, 5, dtype=torch.int64))
    if not step:
        with torch.no_grad():
            engine(torch.zeros(2, 5, dtype=torch.int64))
        engine.module.seen.zero_()
    engine.reload_states()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rest_between_steps_changes_nothing(stage: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reset(engine: Any, step: int) -> None:
        if not step:
            engine.module.seen.zero_()

    case = here(stage, extra=LOW["bf16" if stage == 2 else "fp32"])
    expected = trained(case, between=reset)
    # On this machine device and host are one; copies stand for the way there and back.
    monkeypatch.setattr("sheer.device.to_host", lambda tensor, pinned: tensor.clone())
    assert_same(trained(case, between=resting_between), expected)
    engine = start(odd(), case)
    with pytest.raises(UsageError, match=r"no states 'optim_state'; .* Did you mean 'optim_states'"):
        engine.offload_states(include=["optim_state"])
    with pytest.raises(UsageError, match=r"device='nvme'"):
        engine.offload_states(device="nvme")
    engine.offload_states()
    engine.save_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="reload_states"):
        engine.load_checkpoint(tmp_path)
    engine.destroy()


@pytest.mark.world_size(2)
def test_no_room_is_an_error_before_anything_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = offloaded(here(2), tmp_path / "missing", optim="nvme")
    model = odd()
    before = values(model)
    said = r"zero_optimization\.offload_optimizer\.nvme_path='.*missing': .* cannot be made there \(No such file"
    with pytest.raises(ConfigError, match=said):
        start(model, case)

    def full(fd: int, at: int, nbytes: int) -> None:
        if nbytes > 10_000:  # the masters and two moments together; none of them alone
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if case.rank == 1:
        monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"nvme_path=.*\(No space left on device\)"):
        start(model, offloaded(case, tmp_path, optim="nvme"))
    for fqn, value in values(model).items():
        assert torch.equal(value, before[fqn])


MEASURED = """
import json, os, sys
import torch
import sheer

folder, out = sys.argv[1:]
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(48)])
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 2**18,
        "offload_optimizer": {"device": "nvme", "nvme_path": folder},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
engine = sheer.initialize(model=model, config=config)[0]


def backward():
    engine.backward(engine(torch.ones(1, 512, dtype=torch.bfloat16)).square().mean())


def status():
    lines = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    now = sum(int(lines[key].split()[0]) for key in ("RssAnon", "RssFile", "RssShmem"))
    return now * 1024, int(lines["VmHWM"].split()[0]) * 1024


def peak(*works):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    for work in works:
        work()
    return status()[1] - start


backward()
start = status()[0]
found = {
    "step": peak(engine.step, backward, engine.step),
    "save": peak(lambda: engine.save_checkpoint(out)),
    "beside": peak(lambda: engine.save_checkpoint(out, blocking=False), engine.wait_for_checkpoint),
    "load": peak(lambda: engine.load_checkpoint(out)),
    "again": peak(backward, engine.step),
}
print(json.dumps({"peak": found, "names": os.listdir(folder)}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it in /proc")
def test_resident_memory_is_bounded(tmp_path: Path) -> None:
    """144 MB of masters and moments in files; in memory at most what two buckets need, whatever the engine does."""
    folder = tmp_path / "files"
    folder.mkdir()
    # Else glibc keeps freed buffers, as many as it deems right.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**18), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURED, str(folder), str(tmp_path / "out")]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert max(told["peak"].values()) < 24 * 2**20, told
    assert told["names"] == []  # so a kill leaves nothing
