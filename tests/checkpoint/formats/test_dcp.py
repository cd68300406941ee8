"""What torch.distributed.checkpoint saved on two ranks trains on here; what we export, it loads."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import sheer
from sheer.checkpoint.formats import find_foreign
from sheer.checkpoint.formats.dcp.stored import _runs
from sheer.cli import main
from sheer.errors import CheckpointError
from sheer.testing import rank
from tests.checkpoint.formats.make_deepspeed import STEPS, Net, batch, optimizer
from tests.checkpoint.ranks import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4}


def trained(model: nn.Module, steps: range) -> tuple[torch.optim.Optimizer, list[float]]:
    made = optimizer(model)
    return made, train(model, made, steps)


def train(model: nn.Module, made: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        made.zero_grad()
        loss = model(*batch(step, 0))  # every rank has the same data
        loss.backward()
        made.step()
        losses.append(loss.item())
    return losses


def engine_of(stage: int = 0) -> Any:
    model = Net(7)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    return sheer.initialize(model=model, optimizer=optimizer(model), config=config)[0]


def assert_goes_on(engine: Any, expected: list[float]) -> None:
    found = []
    for step in range(STEPS, STEPS + len(expected)):
        loss = engine(*batch(step, 0))
        engine.backward(loss)
        engine.step()
        found.append(engine.last_step.loss)
    assert found == pytest.approx(expected, rel=1e-5)


HOW = ["by name", "flattened", "by number"]


def state_of(model: nn.Module, made: torch.optim.Optimizer, how: str) -> dict[str, Any]:
    if how == "by number":
        return {"model": model.state_dict(), "optimizer": made.state_dict(), "step": STEPS}
    options = StateDictOptions(flatten_optimizer_state_dict=how == "flattened")
    module, moments = get_state_dict(model, made, options=options)
    return {"model": module, "optim": moments, "step": STEPS}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_fsdp_saved_by_dcp_trains_on(stage: int, world_size: int, tmp_path: Path) -> None:
    model = Net(0)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    made, _ = trained(model, range(STEPS))
    dcp.save({**state_of(model, made, "by name"), "note": {"x": [1, 2]}}, checkpoint_id=tmp_path / "dcp")
    expected = train(model, made, range(STEPS, STEPS + 3))
    engine = engine_of(stage)
    path, client_state = engine.load_checkpoint(tmp_path / "dcp")
    assert path == str(tmp_path / "dcp")
    assert client_state == {"step": STEPS, "note.x": [1, 2]}
    assert_goes_on(engine, expected)
    engine.destroy()


@pytest.mark.parametrize("how", HOW)
def test_every_way_to_call_parameters(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net(0)
    made, _ = trained(model, range(STEPS))
    dcp.save(state_of(model, made, how), checkpoint_id=tmp_path / "dcp", no_dist=True)
    expected = train(model, made, range(STEPS, STEPS + 3))
    engine = engine_of()
    engine.load_checkpoint(tmp_path / "dcp")
    assert_goes_on(engine, expected)
    engine.destroy()
    assert main(["ckpt", "import", str(tmp_path / "dcp"), str(tmp_path / "root")]) == (2 if how == "by number" else 0)
    assert how != "by number" or "parameters are numbered" in capsys.readouterr().err


@pytest.mark.world_size(2)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_cut_of_a_tensor(dim: int, world_size: int, tmp_path: Path) -> None:
    whole = torch.arange(105.0).reshape(3, 5, 7)
    mesh = init_device_mesh("cpu", (world_size,))
    dcp.save({"model": {"w": distribute_tensor(whole, mesh, [Shard(dim)])}}, checkpoint_id=tmp_path / "dcp")
    if rank() == 0:
        found = find_foreign(tmp_path / "dcp")
        assert found is not None
        pieces = sorted(found.read().shards, key=lambda shard: shard.start)
        assert same(torch.cat([piece.data for piece in pieces]).view(whole.shape), whole)


def test_runs_of_a_box() -> None:
    assert list(_runs((), (), ())) == [(0, 1)]
    assert list(_runs((4, 6), (1, 0), (2, 6))) == [(6, 12)]
    assert list(_runs((4, 6), (1, 2), (2, 3))) == [(8, 3), (14, 3)]
    assert list(_runs((2, 3, 2), (0, 1, 0), (2, 2, 2))) == [(2, 4), (8, 4)]


@pytest.mark.parametrize("optim", [True, False])
def test_dcp_loads_what_is_exported(optim: bool, tmp_path: Path) -> None:
    engine = engine_of(2)
    for step in range(STEPS):
        engine.backward(engine(*batch(step, 0)))
        engine.step()
    engine.save_checkpoint(tmp_path / "root")
    assert main(["ckpt", "export", str(tmp_path / "root"), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    model = Net(5)
    made = optimizer(model)
    train(model, made, range(1))  # the library fills the state that is there
    module, moments = get_state_dict(model, made)
    wanted = {"model": module, "optim": moments} if optim else {"model": module}
    dcp.load(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(same(module[name], value) for name, value in engine.module.state_dict().items())
    if optim:
        set_state_dict(model, made, model_state_dict=module, optim_state_dict=moments)
        assert_goes_on(engine, train(model, made, range(STEPS, STEPS + 3)))
    engine.destroy()


# --- refused ----------------------------------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit(99)",)


def saved(folder: Path, **more: Any) -> Path:
    dcp.save({"model": {"w": torch.ones(3)}, **more}, checkpoint_id=folder, no_dist=True)
    return folder


def read(folder: Path) -> Any:
    found = find_foreign(folder)
    assert found is not None
    return found.read()


def test_metadata_that_would_run_code_does_not(tmp_path: Path) -> None:
    path = saved(tmp_path / "dcp") / ".metadata"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(Hostile(), protocol=protocol))
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read as plain data: it names .*exec"):
            read(tmp_path / "dcp")


def test_objects_that_are_not_plain_data_are_left_out_and_said(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", mine=Hostile, lr=0.5)
    foreign = read(folder)
    assert "left out, since it is not plain data: mine" in foreign.said
    assert foreign.state["client_state"] == {"lr": 0.5}


def test_files_that_are_cut_or_gone_or_elsewhere_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp")
    (file,) = folder.glob("*.distcp")
    data = file.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 1):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=file.name):
            read(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=file.name):
        read(folder)
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../../passwd"))
    with pytest.raises(CheckpointError, match="is not a file beside it"):
        read(folder)


def test_several_models_need_a_name(tmp_path: Path) -> None:
    both = {"one": {"w": torch.ones(3)}, "two": {"w": torch.ones(3)}}
    dcp.save(both, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match="cannot be told; they lie under 'one', 'two'"):
        read(tmp_path / "dcp")
    foreign = read(saved(tmp_path / "ema", ema={"w": torch.zeros(3)}))
    assert [shard.name for shard in foreign.shards] == ["w"]
    assert foreign.said[1] == "left out, since only the model and the optimizer are read: ema.w"
