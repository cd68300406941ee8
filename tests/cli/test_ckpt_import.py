"""Other projects' files become checkpoints that load into engines; what would run code or means nothing is refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import sheer
from sheer.checkpoint import load_full
from sheer.cli import main
from tests.checkpoint.ranks import same
from tests.cli.test_ckpt_export import Model


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def imported(source: Path, root: Path, *options: str) -> dict[str, torch.Tensor]:
    assert main(["ckpt", "import", str(source), str(root), *options]) == 0
    return load_full(root)


def assert_holds(full: dict[str, torch.Tensor], model: nn.Module) -> None:
    assert full.keys() == model.state_dict().keys()
    assert all(same(full[name], value) for name, value in model.state_dict().items())


def write(model: Model, kind: str, folder: Path) -> Path:
    """As the formats' own libraries write it."""
    if kind == "pt":
        torch.save(model.state_dict(), folder / "model.pt")
        return folder / "model.pt"
    if kind == "old pt":
        torch.save(model.state_dict(), folder / "old.bin", _use_new_zipfile_serialization=False)
        return folder / "old.bin"
    safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    return folder / "model.safetensors" if kind == "safetensors" else folder


@pytest.mark.parametrize("kind", ["pt", "old pt", "safetensors", "folder"])
def test_what_the_formats_own_libraries_wrote(model: Model, kind: str, tmp_path: Path) -> None:
    source = write(model, kind, tmp_path)
    full = imported(source, tmp_path / "root", "--tag", "theirs")
    if kind == "folder":  # `save_pretrained` leaves it to the model to tie
        full["head.weight"] = full["emb.weight"]
    assert_holds(full, model)
    assert full["head.weight"] is full["emb.weight"]


@pytest.mark.parametrize(("kind", "name"), [("safetensors", "a.safetensors"), ("huggingface", "hf"), ("pt", "a.pt")])
def test_there_and_back(model: Model, kind: str, name: str, tmp_path: Path) -> None:
    torch.save(model.state_dict(), tmp_path / "model.pt")
    imported(tmp_path / "model.pt", tmp_path / "one")
    options = ["--format", kind, "--file-size", "100"]
    assert main(["ckpt", "export", str(tmp_path / "one"), str(tmp_path / name), *options]) == 0
    imported(tmp_path / name, tmp_path / "two")
    assert main(["ckpt", "diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 0


def test_what_is_there_is_not_replaced(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(model, "pt", tmp_path)
    imported(source, tmp_path / "root")
    for what, says in ((source, "has a checkpoint 'imported'"), (tmp_path / "root", "a checkpoint of Sheer's already")):
        where = tmp_path / ("root" if what == source else "other")
        assert main(["ckpt", "import", str(what), str(where)]) != 0
        assert says in capsys.readouterr().err


def test_an_engine_loads_it_buffers_too(tmp_path: Path) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    theirs = build(0)
    theirs(torch.randn(8, 4))
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    imported(tmp_path / "model.pt", tmp_path / "root")
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    engine = sheer.initialize(model=build(1), config=config)[0]
    engine.load_checkpoint(tmp_path / "root", load_module_only=True)
    assert_holds(dict(theirs.state_dict()), engine.module)
    engine.destroy()


@pytest.mark.parametrize("kind", ["pt", "old pt", "safetensors", "folder"])
def test_an_engine_loads_others_weights_where_they_are(model: Model, kind: str, tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine = sheer.initialize(model=Model(), config=config)[0]
    engine.load_checkpoint(write(model, kind, tmp_path), load_module_only=True)
    assert_holds(dict(model.state_dict()), engine.module)
    engine.destroy()


@pytest.mark.parametrize("prefixes", [["_orig_mod."], ["module."], ["module.", "_orig_mod."], ["module.", "wrapped."]])
def test_wrappers_prefixes_are_removed_and_said(
    model: Model, prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrapped = {"".join(prefixes) + name: value for name, value in model.state_dict().items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, tmp_path / "model.pt")
    assert_holds(imported(tmp_path / "model.pt", tmp_path / "root"), model)
    said = capsys.readouterr().out
    assert "took what stands under 'state_dict'; left epoch" in said
    assert all(prefix in said for prefix in prefixes)


def test_a_part_called_module_is_no_prefix(tmp_path: Path) -> None:
    torch.save({"module.w": torch.ones(3), "head.w": torch.ones(4)}, tmp_path / "model.pt")
    assert imported(tmp_path / "model.pt", tmp_path / "root").keys() == {"module.w", "head.w"}
    torch.save({"a._orig_mod.w": torch.ones(3), "a.w": torch.ones(4)}, tmp_path / "twice.pt")
    assert main(["ckpt", "import", str(tmp_path / "twice.pt"), str(tmp_path / "root")]) == 2


def test_safetensors_are_known_by_their_content(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "weights.bin")
    assert imported(tmp_path / "weights.bin", tmp_path / "root").keys() == {"w"}


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


REFUSED: dict[str, tuple[Any, str]] = {
    "no dict": ([1, 2], "holds a list, no state dict"),
    "empty": ({}, "no state dict"),
    "no tensor": ({"w": torch.ones(2), "lr": 0.1}, "'lr' is a float, not a named tensor"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_state_dict_is_refused(
    content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "model.pt")
    assert main(["ckpt", "import", str(tmp_path / "model.pt"), str(tmp_path / "root")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_pickle_that_would_run_code_does_not(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"w": torch.ones(2), "x": Hostile(tmp_path / "ran")}
    if how == "torch":
        torch.save(content, tmp_path / "model.pt")
    else:
        (tmp_path / "model.pt").write_bytes(pickle.dumps(content, protocol=2))
    assert main(["ckpt", "import", str(tmp_path / "model.pt"), str(tmp_path / "root")]) == 2
    assert "the only way Sheer reads a pickle" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_damaged_files_are_refused_by_name(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    cases: list[tuple[Path, bytes]] = [
        (tmp_path / "a.safetensors", b"\xff" * 100),
        (tmp_path / "a.pt", b"\xff" * 100),
        (index, b"{"),
        (index, json.dumps({"weight_map": {"w": "../../etc/passwd"}}).encode()),
        (index, json.dumps({"weight_map": {"w": "gone.safetensors"}}).encode()),
    ]
    for path, data in cases:
        path.write_bytes(data)
        source = path if path.parent == tmp_path else folder
        assert main(["ckpt", "import", str(source), str(tmp_path / "root")]) == 2
        assert str(source) in capsys.readouterr().err
    assert main(["ckpt", "import", str(tmp_path / "nowhere"), str(tmp_path / "root")]) == 2
