"""A stage compiles like any module: by its blocks, or whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sheer import LayerSpec, PipelineModule
from sheer.compiler import Compiler
from tests.compiler.models import Block, Listener
from tests.pipeline.models import Language

TOKENS = torch.arange(12).view(2, 6) % 11


def listed():
    layers = [LayerSpec(nn.Linear, 8, 8), *[LayerSpec(Block) for _ in range(3)], torch.relu]
    return PipelineModule(layers, num_stages=2, stage=1, boundaries=[0, 1, 5], loss_fn=nn.CrossEntropyLoss())


def cut():
    model = Language(layers=4)
    return PipelineModule.from_module(model, blocks="body.blocks.*", num_stages=2, stage=0, boundaries=[0, 3, 6])


@pytest.mark.parametrize(
    ("build", "x", "blocks"),
    [
        (listed, torch.randn(2, 8), ("1", "2", "3")),
        (cut, TOKENS, ("body.blocks.0", "body.blocks.1")),
    ],
)
@pytest.mark.parametrize("scope", ["auto", "module"])
def test_a_stage_compiles(build, x, blocks, scope):
    module = build()
    plain = copy.deepcopy(module)
    compiler = Compiler(module, backend="aot_eager", scope=scope, teller=Listener())
    compiler.enable()
    assert compiler.targets == (blocks if scope == "auto" else ("",))
    assert isinstance(module, PipelineModule)
    out = first_tensor(module.run(x))
    expected = first_tensor(plain.run(x))
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    expected.sum().backward()
    for (name, mine), (_, theirs) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    compiler.disable()
    assert list(module.state_dict()) == list(plain.state_dict())


def first_tensor(carry):
    return carry[0] if isinstance(carry, tuple) else carry
