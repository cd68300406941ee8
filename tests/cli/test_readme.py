"""What a newcomer runs first, as it stands in the repository: README's quick start and the script to copy."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import sheer
from sheer.testing import rank

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str, number: int) -> str:
    """The `number`th fenced block of `language` in README.md."""
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return found[number]


class Tokens(nn.Module):
    """Reads batches of whole numbers, so that the quick start's bf16 needs no conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(tokens)), tokens)


def test_the_quick_start_trains_and_its_checkpoint_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.loads(block("json", 0))
    config["compile"]["backend"] = "eager"  # inductor takes its time
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = Tokens()
    names = {"model": model, "dataset": [{"tokens": torch.tensor(index % 8)} for index in range(64)]}
    try:
        exec(block("python", 0), names)
        assert names["result"].step == 4
        assert 0 < names["result"].loss < 4  # ln 8 is 2.1
        plain = Tokens()
        exec(block("python", 2), {"model": plain, "sheer": sheer})
        assert torch.equal(plain.head.weight.bfloat16(), model.head.weight)
    finally:
        names["engine"].destroy()


class Deep(nn.Module):
    """Blocks under the name that the README cuts at; it makes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.transformer = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(4, 4) for _ in range(4))})
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.transformer["h"]:
            x = layer(x).relu()
        return nn.functional.cross_entropy(self.head(x), targets)


@pytest.mark.world_size(2)
def test_the_pipeline_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / str(rank())
    own.mkdir()
    monkeypatch.chdir(own)
    config = json.loads(block("json", 0))
    config["compile"]["backend"] = "eager"
    (own / "config.json").write_text(json.dumps(config))
    tokens = torch.arange(8)
    names = {"model": Deep(), "batches": itertools.repeat((tokens, tokens)), "sheer": sheer}
    exec(block("python", 1), names)
    assert 0 < names["loss"] < 4  # on both stages
    assert len(list(names["engine"].module.parameters())) < 11
    names["engine"].destroy()


def test_the_script_to_copy_trains_and_goes_on(tmp_path: Path) -> None:
    def run(steps: int) -> str:
        script = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--steps", str(steps)]
        return subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert run(1) == ""
    assert run(2) == "going on from step 1 in checkpoints; --steps is 2\n"
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step2"
