from __future__ import annotations

import fcntl
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from sheer.checkpoint import Shard, list_tags, save
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


def test_show_says_who_wrote_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"run": {"stage": 2, "precision": "bf16"}, "optimizer": {"class": "AdamW"}, "frozen": ["w"]}
    state = {"counters": {"global_steps": 40}, "client_state": {"epoch": 3}}
    shards = [whole("param", "w", torch.zeros(3))]
    save(tmp_path, "t", shards=shards, facts=facts, state=state, rng={}, axis=Solo())
    assert main(["ckpt", "show", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "by 1 rank, step 40\n" in said
    assert "run: stage 2, precision bf16, optimizer AdamW\nfrozen: w\nclient state: epoch\n" in said


# --- verify -----------------------------------------------------------------------------------------------------------


def damage(file: Path, *places: int) -> None:
    data = bytearray(file.read_bytes())
    for at in places:
        data[at] ^= 1
    file.write_bytes(data)


def test_verify_finds_a_checkpoint_whole(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "verify", str(root)]) == 0
    assert capsys.readouterr().out == f"{root / 'step7'}: whole, 1.6 kB verified\n"


def test_verify_lists_all_damage_and_exits_with_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = root / "step7" / "rank00000.safetensors"
    damage(file, -1, -100, 900)  # the last of them in another tensor
    damage(root / "step7" / "state.json", 0)
    assert main(["ckpt", "verify", str(root), "--json"]) == 1
    faults = json.loads(capsys.readouterr().out)[0]["faults"]
    assert len(faults) == 3
    assert "state.json: the content does not match" in faults[0]
    assert {"param 'emb[bold]'" in fault for fault in faults[1:]} == {True, False}


def test_verify_takes_all_checkpoints_also_one_that_cannot_be_opened(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(root, "step8", shards=[], facts={}, state={}, rng={}, axis=Solo())
    (root / "step7" / "rng.safetensors").unlink()
    assert main(["ckpt", "verify", "--all", str(root)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "rng.safetensors: the file is missing" in said[0]
    assert said[1] == f"{root / 'step8'}: whole, 0.0 kB verified"
    assert main(["ckpt", "verify", str(root / "nowhere")]) == 2


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """80 MB in one tensor, under two tags that differ in one element."""
    value = torch.zeros(20_000_000)
    for tag in ("a", "b"):
        save(tmp_path, tag, shards=[whole("param", "w", value)], facts={}, state={}, rng={}, axis=Solo())
        value[-1] = 1
    return tmp_path


@pytest.mark.parametrize("command", ["verify", "diff"])
def test_memory_stays_at_a_few_chunks(large: Path, command: str) -> None:
    words = [str(large), "--tag", "a"] if command == "verify" else [str(large / "a"), str(large / "b")]
    tracemalloc.start()
    assert main(["ckpt", command, *words]) == (0 if command == "verify" else 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 8 * 2**20 + 8 * 2**20


# --- diff -------------------------------------------------------------------------------------------------------------


def two(root: Path, one: list[Shard], other: list[Shard]) -> list[str]:
    for tag, shards in (("a", one), ("b", other)):
        save(root, tag, shards=shards, facts={}, state={}, rng={}, axis=Solo())
    return ["ckpt", "diff", str(root / "a"), str(root), "--tag-other", "b"]


def test_diff_says_how_each_tensor_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same, nan = torch.randn(50, 2), torch.full((40,), float("nan"))
    one: dict[str, Any] = {"same": same, "nan": nan, "gone": same, "shape": same, "dtype": same, "w": torch.zeros(100)}
    other = dict(
        one, shape=same.T.contiguous(), dtype=same.half(), w=torch.zeros(100).index_fill(0, torch.arange(2), 3)
    )
    other["new"] = other.pop("gone")
    argv = two(tmp_path, *([whole("param", n, v) for n, v in named.items()] for named in (one, other)))
    assert main([*argv, "--json"]) == 1
    found = {row.pop("name"): row for row in json.loads(capsys.readouterr().out)["differ"]}
    assert found == {
        "gone": {"kind": "param", "what": "only in the first"},
        "new": {"kind": "param", "what": "only in the second"},
        "shape": {"kind": "param", "what": "shape", "one": [50, 2], "other": [2, 50]},
        "dtype": {"kind": "param", "what": "dtype", "one": "float32", "other": "float16"},
        "w": {
            "kind": "param",
            "what": "values",
            "differ": 2,
            "of": 100,
            "largest": 3.0,
            "norm": pytest.approx(18**0.5),
        },
    }
    assert main(argv) == 1
    assert "2 of 100 elements, by at most 3 (norm 4.24)" in capsys.readouterr().out


def test_diff_of_the_same_in_other_pieces_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = torch.arange(300) % 7
    argv = two(tmp_path, [whole("buffer", "w", value)], cut("buffer", "w", value, cuts=[10, 200]))
    assert main(argv) == 0
    assert "hold the same tensors" in capsys.readouterr().out


# --- prune ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path: Path) -> Path:
    for number in range(5):
        save(tmp_path, f"t{number}", shards=[], facts={}, state={}, rng={}, axis=Solo(), save_latest=number < 2)
        os.utime(tmp_path / f"t{number}" / "index.json", ns=(number, number))
    return tmp_path


def test_prune_keeps_the_newest_and_the_latest(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (many / ".tmp-t9-0123").mkdir()
    assert main(["ckpt", "prune", str(many), "--keep", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out == "would remove 2: t0, t2\nkept 3: t1, t3, t4\n"
    assert len(list_tags(many)) == 5
    assert main(["ckpt", "prune", str(many), "--keep", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "removed": ["t0", "t2"],
        "kept": ["t1", "t3", "t4"],
        "dry_run": False,
    }
    assert sorted(os.listdir(many)) == [".lock", "latest", "t1", "t3", "t4"]


def test_prune_leaves_what_is_not_ours(tmp_path: Path, many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "t0"  # one checkpoint's own directory is no directory of checkpoints
    assert main(["ckpt", "prune", str(other), "--keep", "1"]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    assert main(["ckpt", "prune", str(many), "--keep", "0"]) == 2
    with (many / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["ckpt", "prune", str(many), "--keep", "1"]) == 2
    assert "in progress" in capsys.readouterr().err
    assert len(list_tags(many)) == 5
