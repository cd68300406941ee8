"""What DeepSpeed 0.19.8 saved trains on here as it does there, whatever stage and ranks saved it and load it.

`golden/` was made by `make_deepspeed.py`; where deepspeed is installed, the same is made anew by the live tests.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import sheer
from sheer.checkpoint import load_full, open_checkpoint, read_full, read_state
from sheer.checkpoint.formats import Foreign, find_foreign
from sheer.checkpoint.mapped import Mapped, MappedReader
from sheer.cli import main
from sheer.errors import CheckpointError
from sheer.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from sheer.testing import rank
from tests.checkpoint.formats import make_deepspeed as maker
from tests.checkpoint.formats.make_deepspeed import GOLDEN, KINDS, MICRO, MORE, STEPS, Kind, Net
from tests.checkpoint.ranks import same

PLAIN = [name for name, kind in KINDS.items() if not kind.stages]
PIPELINES = [name for name, kind in KINDS.items() if kind.stages]


def unpacked(name: str, folder: Path) -> Path:
    with zipfile.ZipFile(GOLDEN / f"{name}.zip") as archive:
        archive.extractall(folder / name)
    return folder / name


def read(folder: Path, groups: Any = None) -> Foreign:
    found = find_foreign(folder)
    assert found is not None
    assert found.format == "DeepSpeed"
    return found.read(groups)


def tensors(foreign: Foreign, *kinds: str) -> dict[str, torch.Tensor]:
    source = Mapped.of(Path("x"), shards=foreign.shards, facts={**foreign.facts, "ties": foreign.ties})
    return read_full(source, reader=MappedReader, kinds=kinds)


def build(kind: Kind, stage: int, *, micro: int, **extra: Any) -> Any:
    """An engine of ours with other values than the checkpoint's."""
    config = {**maker.config(kind), "train_micro_batch_size_per_gpu": micro, **extra}
    config["zero_optimization"] = {"stage": stage}
    config.pop("data_types", None)
    model = Net(7)
    return sheer.initialize(model=model, optimizer=maker.optimizer(model), config=config)[0]


def losses(engine: Any, batches: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> list[float]:
    """The losses of steps over whole batches, given rank by rank of the run that saved."""
    found = []
    for parts in batches:
        loss = engine(*(torch.cat(side) for side in zip(*parts, strict=True)))
        engine.backward(loss)
        engine.step()
        found.append(engine.last_step.loss)  # the mean over ranks
    return found


def next_batches(kind: Kind, ranks: range) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    return [[maker.batch(step, one) for one in ranks] for step in range(STEPS, STEPS + MORE)]


def assert_goes_on(found: list[float], folder: Path, kind: Kind) -> None:
    """The first loss is that of the same weights. Later ones hang on moments, counters and schedule; low precision
    rounds the gradients of a batch in one otherwise than those of its parts, by some thousandths of a loss."""
    after = json.loads((folder / "after.json").read_text())[: kind.comparable]
    assert found[0] == pytest.approx(after[0], rel=1e-6)
    assert found[1 : kind.comparable] == pytest.approx(after[1:], rel=1e-5 if kind.precision == "fp32" else 4e-3)


def check_plain(folder: Path, kind: Kind, stage: int = 0) -> None:
    engine = build(kind, stage, micro=MICRO * kind.world)
    path, client_state = engine.load_checkpoint(folder)
    assert path == str(folder / f"global_step{STEPS}")
    assert client_state == {"mine": [1, {"a": 2.5}]}
    assert (engine.global_steps, engine.skipped_steps) == (STEPS, 0)
    assert engine.global_samples == STEPS * MICRO * kind.world
    assert int(engine.module.count) == STEPS
    assert_goes_on(losses(engine, next_batches(kind, range(kind.world))), folder, kind)
    engine.destroy()


@pytest.mark.parametrize("name", PLAIN)
def test_a_run_goes_on(name: str, tmp_path: Path) -> None:
    check_plain(unpacked(name, tmp_path), KINDS[name], stage=PLAIN.index(name) % 4)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("name", "stage"), [("zero1", 3), ("zero3-bf16", 1), ("zero1-universal", 2), ("plain-bf16", 3), ("zero3-bf16", 3)]
)
def test_a_run_goes_on_on_two_ranks_at_any_stage(name: str, stage: int, world_size: int, tmp_path: Path) -> None:
    folder, kind = tmp_path / name, KINDS[name]
    if rank() == 0:
        unpacked(name, tmp_path)
    engine = build(kind, stage, micro=MICRO)
    engine.load_checkpoint(folder)  # waits for rank 0
    assert_goes_on(losses(engine, next_batches(kind, range(rank(), rank() + 1))), folder, kind)
    engine.destroy()


def pipeline_engine(kind: Kind, *, num_stages: int) -> Any:
    torch.manual_seed(7)
    module = PipelineModule(maker.layers(LayerSpec, TiedLayerSpec), num_stages=num_stages, loss_fn=maker.pipeline_loss)
    config = maker.config(kind)
    config["gradient_accumulation_steps"] *= kind.world // kind.stages
    return sheer.initialize(model=module, config=config)[0]


def pipeline_batches(kind: Kind) -> Any:
    """All data ranks' micro-batches of a step, one after the other."""
    dtype = torch.float32 if kind.precision == "fp32" else torch.bfloat16
    for step in range(STEPS, STEPS + MORE):
        for one in range(kind.world // kind.stages):
            for number in (2 * step, 2 * step + 1):
                x, y = maker.batch(number, one)
                yield x.to(dtype), y


def check_pipeline(folder: Path, kind: Kind) -> None:
    engine = pipeline_engine(kind, num_stages=1)
    engine.load_checkpoint(folder)
    data = pipeline_batches(kind)
    assert_goes_on([engine.train_batch(data) and engine.last_step.loss for _ in range(MORE)], folder, kind)
    engine.destroy()


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_goes_on_in_one_piece(name: str, tmp_path: Path) -> None:
    check_pipeline(unpacked(name, tmp_path), KINDS[name])


@pytest.mark.world_size(2)
def test_a_pipeline_goes_on_in_two_stages(tmp_path: Path) -> None:
    kind = KINDS["pipeline-zero1"]
    folder = tmp_path / "pipeline-zero1"
    if rank() == 0:
        unpacked("pipeline-zero1", tmp_path)
    engine = pipeline_engine(kind, num_stages=2)
    engine.load_checkpoint(folder)
    data = pipeline_batches(kind)
    assert_goes_on([engine.train_batch(data) and engine.last_step.loss for _ in range(MORE)], folder, kind)
    engine.destroy()


# --- exactly --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PLAIN if KINDS[name].stage])
def test_masters_and_moments_are_what_deepspeeds_own_accessors_gave(name: str, tmp_path: Path) -> None:
    folder = unpacked(name, tmp_path)
    foreign = read(folder)
    expected = torch.load(folder / "expected.pt", weights_only=True)
    kinds = {"fp32": "param", "exp_avg": "optim.exp_avg", "exp_avg_sq": "optim.exp_avg_sq"}
    for key, kind in kinds.items():
        found, wanted = tensors(foreign, kind), {name: held[key] for name, held in expected.items() if key in held}
        assert all(same(found[name], value) for name, value in wanted.items()), key
        assert key != "fp32" or len(wanted) == 6
    assert all(float(step) == STEPS for step in tensors(foreign, "optim.step").values())


def test_every_kind_of_one_run_holds_the_same(tmp_path: Path) -> None:
    """The same run, saved sharded and in the universal form; the buffers and the frozen layer are there in both."""
    one, other = (read(unpacked(name, tmp_path)) for name in ("zero1", "zero1-universal"))
    names = {"param", "buffer", "optim.step", "optim.exp_avg", "optim.exp_avg_sq"}
    assert {shard.kind for shard in one.shards} == names
    for kind in names:
        held, also = tensors(one, kind), tensors(other, kind)
        assert held.keys() == also.keys(), kind
        assert all(same(held[name], also[name]) for name in held), kind
    assert tensors(one, "param", "buffer").keys() == Net(0).state_dict().keys()
    assert one.ties == other.ties == {"tied.weight": "mid.weight"}
    assert one.state == other.state


# --- looked into, imported ------------------------------------------------------------------------------------------


def test_import_makes_a_checkpoint_of_ours_that_trains_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, kind = unpacked("zero2-fp16-3-ranks", tmp_path), KINDS["zero2-fp16-3-ranks"]
    assert main(["ckpt", "import", str(folder), str(tmp_path / "root"), "--source-tag", f"global_step{STEPS}"]) == 0
    assert "DeepSpeed 0.19.8: ZeRO stage 1 or 2" in capsys.readouterr().out
    engine = build(kind, 0, micro=MICRO * kind.world)
    engine.load_checkpoint(tmp_path / "root")
    assert_goes_on(losses(engine, next_batches(kind, range(kind.world))), folder, kind)
    engine.destroy()
    state = read_state(open_checkpoint(tmp_path / "root"))
    assert state["loss_scale"] == {"scaling": "dynamic", "scale": 2048.0, "good_steps": 3, "hysteresis_left": 2}
    assert main(["ckpt", "import", str(folder), str(tmp_path / "weights"), "--weights-only"]) == 0
    assert open_checkpoint(tmp_path / "weights").kinds == {"param", "buffer"}


def test_commands_for_our_own_checkpoints_say_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(unpacked("zero1", tmp_path))
    for command in (["show", folder], ["diff", folder, folder], ["export", folder, "x", "--format", "pt"]):
        assert main(["ckpt", *command]) == 2
        assert "was not saved by Sheer (its format: DeepSpeed). `sheer ckpt import`" in capsys.readouterr().err


def test_what_is_numbered_needs_the_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, kind = unpacked("plain", tmp_path), KINDS["plain"]
    assert main(["ckpt", "import", str(folder), str(tmp_path / "root")]) == 2
    assert "which number is which name is known only from the optimizer groups" in capsys.readouterr().err
    assert main(["ckpt", "import", str(folder), str(tmp_path / "root"), "--weights-only"]) == 0
    assert load_full(tmp_path / "root").keys() == Net(0).state_dict().keys()
    model = Net(7)
    one_group = torch.optim.AdamW(model.parameters())
    config = {"train_micro_batch_size_per_gpu": MICRO}
    engine = sheer.initialize(model=model, optimizer=one_group, config=config)[0]
    with pytest.raises(CheckpointError, match=r"cannot be taken over.*load_optimizer_states=False"):
        engine.load_checkpoint(folder)
    engine.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert kind.stage == 0
    engine.destroy()


def test_the_module_alone_and_by_hand(tmp_path: Path) -> None:
    folder, kind = unpacked("zero3-bf16", tmp_path), KINDS["zero3-bf16"]
    engine = build(kind, 1, micro=MICRO)
    before = engine.module.state_dict()["last.bias"].clone()
    seen: dict[str, torch.Tensor] = {}
    engine.load_checkpoint(folder, custom_load_fn=lambda src, dst: seen.update(src), load_optimizer_states=False)
    assert torch.equal(engine.module.state_dict()["last.bias"], before)
    engine.load_checkpoint(folder, load_module_only=True)
    assert torch.equal(engine.module.state_dict()["last.bias"], seen["last.bias"].bfloat16())
    engine.destroy()


def test_a_part_under_other_names(tmp_path: Path) -> None:
    folder, kind = unpacked("zero2-fp16-3-ranks", tmp_path), KINDS["zero2-fp16-3-ranks"]
    saved = tensors(read(folder), "param", "master")
    engine = build(kind, 2, micro=MICRO)
    before = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    engine.load_checkpoint(folder, include="last.*")
    for name, tensor in engine.module.state_dict().items():
        assert torch.equal(tensor, saved[name].half() if name.startswith("last.") else before[name]), name
    engine.destroy()

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Net(7)

    outer = Outer()
    config = {**maker.config(kind), "train_micro_batch_size_per_gpu": MICRO, "zero_optimization": {"stage": 1}}
    engine = sheer.initialize(model=outer, optimizer=maker.optimizer(outer.body), config=config)[0]
    engine.load_checkpoint(folder, rename={"": "body"}, load_module_only=True)
    assert torch.equal(outer.state_dict()["body.last.bias"], saved["last.bias"].half())
    engine.destroy()


# --- written ----------------------------------------------------------------------------------------------------------


def exported(tmp_path: Path) -> tuple[Path, list[float]]:
    """A run of this library as a universal checkpoint, and the losses of its next steps."""
    kind = KINDS["zero1"]
    model = Net(0)
    config = {**maker.config(kind), "train_micro_batch_size_per_gpu": 2 * MICRO}
    engine = sheer.initialize(model=model, optimizer=maker.optimizer(model), config=config)[0]
    losses(engine, [[maker.batch(step, one) for one in range(2)] for step in range(STEPS)])
    engine.save_checkpoint(tmp_path / "root", client_state={"mine": 3})
    after = losses(engine, next_batches(kind, range(2)))
    engine.destroy()
    target = tmp_path / "universal"
    assert main(["ckpt", "export", str(tmp_path / "root"), str(target), "--format", "deepspeed"]) == 0
    return target, after


def test_an_exported_universal_checkpoint_is_read_back(tmp_path: Path) -> None:
    target, after = exported(tmp_path)
    assert main(["ckpt", "import", str(target), str(tmp_path / "again")]) == 0
    assert main(["ckpt", "diff", str(tmp_path / "root"), str(tmp_path / "again")]) == 0
    engine = build(KINDS["zero1"], 2, micro=2 * MICRO)
    assert engine.load_checkpoint(target)[1] == {"mine": 3}
    assert losses(engine, next_batches(KINDS["zero1"], range(2))) == pytest.approx(after, rel=1e-5)
    engine.destroy()


def test_weights_alone_make_no_universal_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpacked("zero1", tmp_path)
    assert main(["ckpt", "import", str(folder), str(tmp_path / "root"), "--weights-only"]) == 0
    assert main(["ckpt", "export", str(tmp_path / "root"), str(tmp_path / "out"), "--format", "deepspeed"]) == 2
    assert "has no optimizer state" in capsys.readouterr().err


# --- refused ----------------------------------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit(99)",)


def test_a_pickle_that_would_run_code_does_not(tmp_path: Path) -> None:
    folder = unpacked("zero1", tmp_path) / f"global_step{STEPS}"
    for path in sorted(folder.glob("*.pt")):
        good = path.read_bytes()
        torch.save({"optimizer_state_dict": Hostile(), "module": {}}, path)
        with pytest.raises(CheckpointError, match=r"the only way Sheer reads a pickle: .*exec"):
            read(folder)
        path.write_bytes(pickle.dumps(Hostile(), protocol=2))
        with pytest.raises(CheckpointError, match="the only way Sheer reads a pickle"):
            read(folder)
        path.write_bytes(good)


def test_missing_and_cut_files_are_named(tmp_path: Path) -> None:
    folder = unpacked("zero2-fp16-3-ranks", tmp_path) / f"global_step{STEPS}"
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=path.name):
        read(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="the file of zero_pp_rank 1 is missing"):
        read(folder)
    (folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"param '.*elements .* are held by nobody"):
        tensors(read(folder), "param")


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("zero1", "mp_rank_01_model_states.pt"),
        ("zero3-bf16", "zero_pp_rank_0_mp_rank_01_model_states.pt"),
        (PIPELINES[0], "layer_00-model_01-model_states.pt"),
    ],
)
def test_slices_of_tensors_are_refused(name: str, added: str, tmp_path: Path) -> None:
    folder = unpacked(name, tmp_path) / f"global_step{STEPS}"
    (folder / added).write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"slices of tensors.*{added}.*ds_to_universal"):
        read(folder)


def broken(content: Any, way: tuple[Any, ...], value: Any) -> None:
    for key in way[:-1]:
        content = content[key]
    content[way[-1]] = value


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("module", "first.weight"), [3]),
        (("param_shapes", 0), 3),
        (("param_shapes", 0), {}),
        (("global_steps",), None),
        (("shared_params",), 3),
    ],
)
def test_files_of_another_structure_are_an_error_with_its_place(
    way: tuple[Any, ...], value: Any, tmp_path: Path
) -> None:
    folder = unpacked("zero1", tmp_path) / f"global_step{STEPS}"
    content = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    broken(content, way, value)
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=rf"{folder}.*damaged, or made by another version"):
        read(folder)


# --- live -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed (the bench extra)")
@pytest.mark.timeout(400)
def test_what_deepspeed_saves_now(tmp_path: Path) -> None:
    """All kinds, in its own processes: importing deepspeed changes torch."""
    command = [sys.executable, "-m", maker.__name__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for name in PLAIN:
        check_plain(tmp_path / name, KINDS[name])
    for name in PIPELINES:
        check_pipeline(tmp_path / name, KINDS[name])


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed (the bench extra)")
def test_deepspeed_trains_on_from_what_is_exported(tmp_path: Path) -> None:
    target, after = exported(tmp_path)
    maker.load(target)
    assert json.loads((target / "after.json").read_text()) == pytest.approx(after, rel=1e-5)
