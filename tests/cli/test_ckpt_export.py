"""What is exported is what other projects' own readers read, equal to the bit; nothing is overwritten or half there."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from unittest import mock

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from sheer.checkpoint import load_full, save
from sheer.cli import main
from tests.checkpoint.ranks import Solo, cut, same, whole


class Model(nn.Module):
    """Tied weights, a buffer of another dtype, a scalar, a tensor of no elements, odd names."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.low = nn.Parameter(torch.randn(5).bfloat16())
        self.odd = nn.ModuleDict({"ünï/code": nn.Linear(3, 3)})
        self.register_buffer("mask", torch.arange(7) % 2 == 0)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def root(model: Model, tmp_path: Path) -> Path:
    shards = [s for name, p in model.named_parameters() for s in cut("param", name, p, cuts=[3, 100])]
    shards += [whole("buffer", "mask", model.mask), whole("optim.exp_avg", "emb.weight", torch.zeros(30, 8))]
    facts = {"ties": {"head.weight": "emb.weight"}}
    save(tmp_path / "root", "t", shards=shards, facts=facts, state={}, rng={}, axis=Solo())
    return tmp_path / "root"


def export(root: Path, target: Path, *options: str) -> int:
    return main(["ckpt", "export", str(root), str(target), *options])


def test_safetensors_load_into_the_model_by_safetensors_own_loader(model: Model, root: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    assert export(root, target, "--format", "safetensors") == 0
    fresh = Model()
    assert safetensors.torch.load_model(fresh, target) == (set(), [])
    assert all(same(fresh.state_dict()[name], value) for name, value in model.state_dict().items())
    with safetensors.safe_open(target, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "emb.weight"}


def test_pt_loads_by_torch_with_tied_names_sharing(model: Model, root: Path, tmp_path: Path) -> None:
    assert export(root, tmp_path / "model.pt", "--format", "pt") == 0
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state["head.weight"].data_ptr() == state["emb.weight"].data_ptr()
    fresh = Model()
    fresh.load_state_dict(state)
    assert all(same(fresh.state_dict()[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("most", "files"), [("5G", 1), ("100", 3), ("1", 7)])
def test_a_hugging_face_folder_is_cut_into_files_of_the_wanted_size(
    model: Model, root: Path, tmp_path: Path, most: str, files: int
) -> None:
    target = tmp_path / "hf"
    assert export(root, target, "--format", "huggingface", "--file-size", most) == 0
    found = sorted(target.glob("*.safetensors"))
    assert len(found) == files
    named = {file.name: safetensors.torch.load_file(file) for file in found}
    together = {name: value for tensors in named.values() for name, value in tensors.items()}
    expected = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    assert together.keys() == expected.keys()
    assert all(same(together[name], value) for name, value in expected.items())
    if files > 1:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file, tensors in named.items() for name in sorted(tensors)}
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
        assert found[0].name == f"model-00001-of-0000{files}.safetensors"


def test_transformers_reads_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    shards = [whole("param", name, p) for name, p in model.named_parameters()]
    facts = {"ties": {"lm_head.weight": "transformer.wte.weight"}}
    save(tmp_path / "root", "t", shards=shards, facts=facts, state={}, rng={}, axis=Solo())
    assert export(tmp_path / "root", tmp_path / "hf", "--format", "huggingface", "--file-size", "3K") == 0
    config.save_pretrained(tmp_path / "hf")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    assert all(same(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["safetensors", "huggingface", "pt"])
def test_a_dtype_is_for_floating_point_only(root: Path, tmp_path: Path, kind: str) -> None:
    assert export(root, tmp_path / "out", "--format", kind, "--dtype", "float16") == 0
    if kind == "pt":
        found = torch.load(tmp_path / "out", weights_only=True)
    else:
        found = safetensors.torch.load_file(tmp_path / "out" / ("model.safetensors" if kind == "huggingface" else ""))
    stored = load_full(root)
    assert found["mask"].dtype is torch.bool
    assert same(found["emb.weight"], stored["emb.weight"].half())
    assert found["low"].dtype is torch.float16


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    target.write_text("mine")
    for kind in ("safetensors", "huggingface", "pt"):
        assert export(root, target, "--format", kind) == 2
        assert "exists; export to a new place" in capsys.readouterr().err
    assert target.read_text() == "mine"
    before = sorted(os.listdir(tmp_path))
    for kind in ("safetensors", "huggingface", "pt"):
        with mock.patch("os.fsync", side_effect=OSError(28, "No space left on device")):
            assert export(root, tmp_path / "new", "--format", kind) == 2
        assert "cannot export to" in capsys.readouterr().err
        assert sorted(os.listdir(tmp_path)) == before


def test_damage_is_found_while_exporting(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = root / "t" / "rank00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert export(root, tmp_path / "out", "--format", "safetensors") == 2
    assert "do not match their checksum" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["safetensors", "huggingface"])
def test_memory_stays_at_a_few_chunks(tmp_path: Path, kind: str) -> None:
    shards = [whole("param", "w", torch.zeros(20_000_000))]
    save(tmp_path / "root", "t", shards=shards, facts={}, state={}, rng={}, axis=Solo())
    tracemalloc.start()
    assert export(tmp_path / "root", tmp_path / "out", "--format", kind) == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 8 * 2**20


def test_what_safetensors_cannot_say_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = [whole("param", "w", torch.zeros(20, dtype=torch.complex128))]
    save(tmp_path / "root", "t", shards=shards, facts={}, state={}, rng={}, axis=Solo())
    assert export(tmp_path / "root", tmp_path / "out", "--format", "safetensors") == 2
    assert "'w' is torch.complex128, which safetensors has no word for; export to pt" in capsys.readouterr().err
    assert export(tmp_path / "root", tmp_path / "out", "--format", "pt") == 0
