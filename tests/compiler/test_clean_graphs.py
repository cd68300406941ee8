"""What a backend is given: the block's own operations, whatever the engine around it does; the documented example."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sheer
from tests.compiler.models import Block, net, tokens

EXAMPLES = Path(__file__).parents[2] / "examples"


class Keeping:
    """A backend that keeps the code of its graphs."""

    def __init__(self) -> None:
        self.codes: list[str] = []

    def __call__(self, graph_module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.codes.append(graph_module.code)
        return graph_module.forward


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_graph_is_that_of_the_bare_block(stage: int) -> None:
    _assert_bare(stage, hooked=bool(stage % 2))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_so_it_is_on_several_ranks(stage: int) -> None:
    _assert_bare(stage, hooked=not stage % 2)


def _assert_bare(stage: int, *, hooked: bool) -> None:
    bare, ours = Keeping(), Keeping()
    torch.compile(Block(), backend=bare)(torch.randn(4, 5, 8, requires_grad=True))
    model = net()
    if hooked:
        model.blocks[1].register_forward_hook(lambda module, args, output: output)
        model.blocks[1].register_full_backward_hook(lambda module, grad_input, grad_output: None)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "compile": {"enabled": True, "backend": ours},
    }
    engine = sheer.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(tokens()).square().mean())
        engine.step()
    engine.destroy()
    assert ours.codes == bare.codes
    assert len(bare.codes) == 1


def test_the_example_counts_the_operations_of_one_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "compile_backend.py"), run_name="__main__")
    printed = capsys.readouterr().out
    graphs = [line for line in printed.splitlines() if line.startswith("a graph of")]
    assert len(graphs) == 1
    assert "4 linear" in graphs[0]
    assert "1 scaled_dot_product_attention" in graphs[0]
    assert "compile: on, 1 graph in" in printed


def test_the_examples_pass_drops_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from compile_backend import drop_additions_of_zero, operations

    def with_zero(x: torch.Tensor) -> torch.Tensor:
        return (x + 0) * 2 + 1

    traced = torch.fx.symbolic_trace(with_zero)
    assert operations(traced) == {"add": 2, "mul": 1}
    assert drop_additions_of_zero(traced) == 1
    assert operations(traced) == {"add": 1, "mul": 1}
    assert torch.equal(traced(torch.ones(2)), with_zero(torch.ones(2)))
