"""`sheer config`: exit codes, output, and the generated reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sheer.cli import main
from sheer.config.docs import main as docs_main
from sheer.config.docs import render
from sheer.config.schema import json_schema

ROOT = Path(__file__).parents[2]


@pytest.fixture
def good(tmp_path: Path) -> str:
    file = tmp_path / "good.json"
    given = {"train_batch_size": 8, "gradient_clipping": "auto", "aio": {"thread_count": 1}, "amp": {"enabled": False}}
    file.write_text(json.dumps(given))
    return str(file)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    file = tmp_path / "bad.json"
    file.write_text('{"zero_optimization": {"stagee": 1}}')
    return str(file)


def test_check_says_ok_or_fails_with_2(good: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", good]) == 0
    assert capsys.readouterr().out == f"{good}: ok\n"
    assert main(["config", "check", bad]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "zero_optimization.stagee: unknown key in 'zero_optimization'. Did you mean 'stage'?" in said.err


def test_check_resolves_the_batch_for_a_number_of_ranks(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", good, "--ranks", "2"]) == 0
    assert "train_batch_size 8 = micro-batch 4 * accumulation 1 * ranks 2" in capsys.readouterr().out
    assert main(["config", "check", good, "--ranks", "3"]) == 2
    assert "the data-parallel size is 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optimizer": {"type": "AdamWW"}}, ["Did you mean 'AdamW'"]),
        (
            {"optimizer": {"type": "AdamW", "params": {"leer": 1}}, "scheduler": {"type": "WarmupXR"}},
            ["no parameter 'leer'", "Did you mean 'WarmupLR'"],
        ),
        ({"scheduler": {"type": "WarmupDecayLR"}}, ["needs total_num_steps"]),
        ({"train_micro_batch_size_per_gpu": 3}, ["train_micro_batch_size_per_gpu is 3"]),
        ({"train_batch_size": None}, ["batch size is not given"]),
    ],
)
def test_check_finds_what_would_stop_initialize(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any], says: list[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"train_batch_size": 16, **given}))
    assert main(["config", "check", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert all(words in said.err for words in says), said.err


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": {"type": "not.importable.Here", "params": {"anything": 1}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0.0, 0.1, 0.2]}}},
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}}},
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    ],
)
def test_check_lets_pass_what_only_the_run_can_decide(tmp_path: Path, given: dict[str, Any]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"train_batch_size": 16, **given}))
    assert main(["config", "check", str(file)]) == 0


def test_explain_as_json_and_as_one_line_a_key(good: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", good, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    by_key = {row["key"]: row for row in rows}
    assert by_key["train_batch_size"]["value"] == 8
    assert by_key["aio.thread_count"]["reader"] == "nobody"
    assert main(["config", "explain", good]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["key", "value", "source", "read", "by", "remarks"]
    assert [line.split()[0] for line in lines[1:]] == [row["key"] for row in rows]
    assert main(["config", "explain", bad]) == 2
    assert "stagee" in capsys.readouterr().err


def test_schema_is_printed_as_strict_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_the_reference_in_the_repository_is_up_to_date() -> None:
    assert docs_main(["--check", str(ROOT / "docs" / "config.md")]) == 0


def test_the_reference_is_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.md"
    assert docs_main(["--check", str(file)]) == 1
    assert docs_main([str(file)]) == 0
    assert docs_main(["--check", str(file)]) == 0
    file.write_text(render() + "edited")
    assert docs_main(["--check", str(file)]) == 1
    assert "out of date. Run: python -m sheer.config.docs" in capsys.readouterr().err
