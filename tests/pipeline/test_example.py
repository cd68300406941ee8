"""The example's two ways to write its model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.pipeline.test_cut import run

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import gpt
    import pipeline_gpt

    yield pipeline_gpt
    for name in ("gpt", "pipeline_gpt", "text"):
        sys.modules.pop(name, None)
    del gpt


@pytest.mark.parametrize("way", ["cut", "listed"])
def test_every_number_of_stages_gives_one_loss(example, way):
    config = example.GPTConfig(width=24, heads=2, layers=3)
    losses = []
    for stages in (1, 2, 3):
        split = []
        for stage in range(stages):
            torch.manual_seed(0)
            split.append(getattr(example, way)(config, num_stages=stages, stage=stage))
        batch = split[0].split_batch((TOKENS, TOKENS))
        losses.append(split[-1].loss_fn(run(split, batch.inputs), batch.label))
        if stages > 1:
            assert next(iter(split[0].tied.values())) == (0, stages - 1)
    assert losses[0] == losses[1] == losses[2]
    assert 5 < losses[0] < 7
