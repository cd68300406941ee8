from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sheer.checkpoint import save
from sheer.cli import main
from tests.checkpoint.ranks import Solo, cut, whole


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shards = [
        *cut("param", "emb[bold]", torch.zeros(10, 20), cuts=[50]),
        whole("buffer", "mask", torch.ones(3, dtype=torch.bool)),
        whole("optim.exp_avg", "emb[bold]", torch.zeros(10, 20)),
        whole("optim.step", "emb[bold]", torch.tensor(1.0)),
    ]
    facts = {"ties": {"head": "emb[bold]"}}
    save(tmp_path, "step7", shards=shards, facts=facts, state={}, rng={}, axis=Solo())
    return tmp_path


def test_show_lists_tensors_and_sums_up(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "show", str(root)]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if "emb[bold]" in line)
    assert row.split() == ["emb[bold]", "10", "x", "20", "float32", "param", "2", "exp_avg,", "step", "head"]
    assert "200 parameters" in said
    assert f"step7 in {root / 'step7'}" in said


def test_show_keeps_long_names_whole_and_counts_layers_as_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    names = [f"model.transformer.layers.{index}.attention.projection.weight" for index in (10, 2, 0)]
    shards = [whole("param", name, torch.zeros(3)) for name in names]
    save(tmp_path, "step1", shards=shards, facts={}, state={}, rng={}, axis=Solo())
    assert main(["ckpt", "show", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[1:4]] == names[::-1]
    assert "by 1 rank\n" in said
    assert "model 0.0 kB" in said


def test_show_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "show", str(root), "--tag", "step7", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["tag"], said["parameters"], said["model_bytes"], said["optimizer_bytes"]) == ("step7", 200, 803, 804)
    assert [row["tied"] for row in said["tensors"] if row["kind"] == "param"] == [["head"]]


def test_show_of_nothing_says_what_is_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "show", str(root), "--tag", "step8"]) == 2
    assert "Did you mean 'step7'?" in capsys.readouterr().err
