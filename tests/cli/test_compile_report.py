"""`sheer compile-report`: in a process of its own each time, as the hook it sets lasts as long as the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sheer.cli import main

SCRIPT = """
import argparse, sys
import helper  # beside the script
import sheer, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        return x + self.layer(x)

def train(enabled):
    model = nn.Sequential(Block(), Block())
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
              "compile": {"enabled": enabled, "backend": "eager"}}
    engine = sheer.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(2, 4, requires_grad=True)).sum())
    engine.step()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--off", action="store_true")
    parser.add_argument("--end", default="well")
    arguments = parser.parse_args()
    train(not arguments.off)  # the engine is gone when this returns
    print("script:", sys.argv)
    if arguments.end == "status":
        sys.exit(3)
    if arguments.end == "error":
        raise ValueError("in the script")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def _report(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from sheer.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "compile-report", *arguments]
    return subprocess.run(
        command, cwd=script.parent, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_a_script_runs_as_it_would_and_its_report_is_printed_and_written(script: Path) -> None:
    done = _report(script, "train.py", "--end", "well")
    assert done.returncode == 0, done.stderr
    assert "script: ['train.py', '--end', 'well']" in done.stdout
    assert "1 graph in" in done.stdout
    assert "2 x Block: '0', '1'" in done.stdout
    page = (script.parent / "compile-report.html").read_text()
    assert "2 × Block" in page
    assert "Compile report: train.py" in page


def test_a_script_that_fails_is_reported_all_the_same(script: Path) -> None:
    done = _report(script, "--out", "page.html", str(script), "--end", "error")
    assert done.returncode == 1
    assert "ValueError: in the script" in done.stderr
    assert "2 × Block" in (script.parent / "page.html").read_text()


def test_where_nothing_is_compiled_it_says_so_and_ends_as_the_script_does(script: Path) -> None:
    done = _report(script, "train.py", "--off", "--end", "status")
    assert done.returncode == 3, done.stderr
    assert "ValueError" not in done.stderr
    assert '"enabled": true' in done.stdout
    assert "No model was compiled" in (script.parent / "compile-report.html").read_text()


def test_only_rank_0_reports(script: Path) -> None:
    (script.parent / "other.py").write_text("print('ran')")
    done = _report(script, "other.py", RANK="1")
    assert done.stdout == "ran\n"
    assert not (script.parent / "compile-report.html").exists()


def test_a_wrong_request_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile-report", str(tmp_path / "none.py")]) == 2
    assert "none.py" in capsys.readouterr().err
    (tmp_path / "some.py").write_text("")
    assert main(["compile-report", "--out", str(tmp_path / "no" / "x.html"), str(tmp_path / "some.py")]) == 2
    assert "make it first" in capsys.readouterr().err
