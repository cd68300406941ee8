"""Targets in every place a model may have them: nested, shared, tied, inside checkpointing and around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sheer.compiler.slot import KEY
from tests.compiler.models import Block, Net, Run, assert_same, compiled, net, run, tokens, twin


def _equal(model: nn.Module, *args: Any, steps: int = 2) -> None:
    plain = twin(model)
    for seed in range(steps):
        torch.manual_seed(seed)
        found = run(model, *args)
        torch.manual_seed(seed)
        assert_same(found, run(plain, *args))


def _slots(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if KEY in module.__dict__]


class Stage(nn.Module):
    """Blocks of its own, and a repetition of itself outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = block(x)
        return x


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.stages = nn.ModuleList([Stage(), Stage()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for stage in self.stages:
            x = stage(x)
        return x


@pytest.mark.parametrize(
    ("scope", "targets", "graphs"),
    [
        ("auto", ["stages.0", "stages.1"], 1),
        ("module", [""], 1),
        (["Block"], [f"stages.{i}.inner.{j}" for i in (0, 1) for j in (0, 1)], 1),
        (["stages.0", "*.inner.1"], ["stages.0", "stages.1.inner.1"], 2),
        (["Stage", "Block", "stages.1.inner.0.up"], ["stages.0", "stages.1"], 1),
        (["embed", "*.up"], ["embed", *(f"stages.{i}.inner.{j}.up" for i in (0, 1) for j in (0, 1))], 2),
    ],
)
def test_nested_modules(scope: Any, targets: list[str], graphs: int) -> None:
    torch.manual_seed(0)
    model = Deep()
    compiler = compiled(model, scope=scope, backend="aot_eager" if scope == "module" else "eager")
    assert list(compiler.targets) == targets
    assert _slots(model) == targets
    _equal(model, tokens())
    assert compiler.report.graphs == graphs
    assert compiler.report.fallbacks == []
    assert compiler.report.breaks == []


class Around(Net):
    """Checkpoints every block."""

    reentrant = False

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        x = self.embed(value)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class AroundReentrant(Around):
    reentrant = True


class Inside(Block):
    """Checkpoints its own half."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self._half, x, use_reentrant=self.reentrant)

    def _half(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


class InsideReentrant(Inside):
    reentrant = True


@pytest.mark.parametrize("scope", ["auto", ["Linear"]], ids=["blocks", "layers"])
@pytest.mark.parametrize("kind", [Around, AroundReentrant])
def test_checkpointing_around_targets(kind: type[Around], scope: Any) -> None:
    torch.manual_seed(0)
    model = kind(dropout=0.2)
    compiler = compiled(model, backend="aot_eager" if scope == "auto" else "eager", scope=scope)
    _equal(model, tokens())
    assert compiler.report.fallbacks == []
    assert 1 <= compiler.report.graphs <= 8


@pytest.mark.parametrize("kind", [Inside, InsideReentrant])
def test_checkpointing_inside_targets(kind: type[Inside]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind(), kind())
    compiler = compiled(model, backend="aot_eager")
    _equal(model, torch.randn(3, 8, requires_grad=True))
    assert compiler.report.fallbacks == []
    assert compiler.report.graphs >= 1
    assert len(compiler.report.breaks) <= (kind is InsideReentrant)


class Recurrent(nn.Module):
    """One block at three places: twice in a list, and inside a stage."""

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.stage = Stage()
        self.stage.inner[1] = block
        self.layers = nn.ModuleList([block, Block(), block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stage(x)
        for block in self.layers:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("scope", "targets"),
    [
        ("auto", ("stage.inner.0", "stage.inner.1", "layers.1")),
        (["layers.*"], ("layers.0", "layers.1")),
        (["layers.0"], ("layers.0",)),
        (["stage", "layers.2"], ("stage", "layers.2")),
        (["stage", "Block"], ("stage", "layers.0", "layers.1")),
        (["stage", "stage.*"], ("stage",)),
    ],
)
def test_a_block_at_several_places_is_compiled_at_each(scope: Any, targets: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = Recurrent()
    compiler = compiled(model, scope=scope)
    assert set(compiler.targets) == set(targets)
    _equal(model, torch.randn(3, 8, requires_grad=True))
    compiler.review()
    assert compiler.report.fallbacks == []
    assert compiler.report.graphs <= 3
    compiler.disable()
    assert _slots(model) == []


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks[2].norm = self.blocks[0].norm


@pytest.mark.parametrize("scope", ["auto", "module", ["Linear", "Embedding"]], ids=["auto", "module", "layers"])
def test_tied_weights(scope: Any) -> None:
    torch.manual_seed(0)
    model = Tied()
    compiler = compiled(model, scope=scope, backend="aot_eager")
    _equal(model, tokens())
    assert compiler.report.fallbacks == []


class Flexible(nn.Module):
    """Takes and gives what it gets: tensors, masks, tuples, dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Any, mask: torch.Tensor | None = None, *, extra: dict[str, Any] | None = None) -> Any:
        if isinstance(x, tuple):
            return tuple(self.layer(each) for each in x)
        y = self.layer(x)
        if mask is not None:
            y = y * mask
        return {"y": y, **extra} if extra is not None else y


def test_kinds_of_input_and_output_each_have_their_graph() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Flexible(), Flexible()])
    compiler = compiled(model)
    plain = twin(model)
    x, mask = torch.randn(2, 8, requires_grad=True), torch.ones(8)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}),
        ((x, mask), {}),
        ((x,), {"mask": mask}),
        (((x, x),), {}),
        ((x,), {"extra": {"x": x}}),
        ((torch.randn(2, 3, 8, requires_grad=True),), {}),
    ]
    for _ in range(2):
        for args, kwargs in calls:
            for index in range(2):
                found, wanted = model[index](*args, **kwargs), plain[index](*args, **kwargs)
                assert type(found) is type(wanted)
                torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert compiler.report.graphs <= len(calls)
    assert compiler.report.fallbacks == []


def test_a_model_whose_blocks_call_forward_directly_is_right_and_said() -> None:
    class Direct(Net):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            x = self.embed(value)
            for block in self.blocks:
                x = block.forward(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Direct()
    compiler = compiled(model)
    _equal(model, tokens())
    compiler.review()
    assert {found.target for found in compiler.report.fallbacks} == {"blocks.0", "blocks.1", "blocks.2"}
    assert len(compiler._teller.said) == 1


class Generating(Net):
    def generate(self, value: torch.Tensor, count: int) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(count):
                value = torch.cat([value, self.forward(value)[:, -1:].argmax(-1)], 1)
        return value


@pytest.mark.parametrize("scope", ["auto", "module"])
def test_generation_through_forward_is_right_and_leaves_training_alone(scope: str) -> None:
    torch.manual_seed(0)
    model = Generating()
    compiler = compiled(model, scope=scope)
    run(model, tokens())
    training = compiler.report.graphs
    assert torch.equal(model.generate(tokens(), 6), twin(model).generate(tokens(), 6))
    _equal(model, tokens())
    assert [graph.mode for graph in compiler.report.compiled].count("training") == training


def test_the_modes_of_one_model_in_any_order() -> None:
    """Training, evaluation with and without gradients, inference mode, other batches: all equal eager."""
    model = net(dropout=0.0)
    compiler = compiled(model)
    plain = twin(model)
    for batch, mode in ((4, "inference"), (4, "train"), (2, "no_grad"), (4, "eval"), (3, "train"), (4, "train")):
        model.train(mode == "train")
        plain.train(mode == "train")
        if mode in ("train", "eval"):
            assert_same(run(model, tokens(batch)), run(plain, tokens(batch)))
        else:
            with torch.inference_mode() if mode == "inference" else torch.no_grad():
                assert torch.equal(model(tokens(batch)), plain(tokens(batch)))
    assert compiler.report.fallbacks == []


def test_dtype_changes_of_the_model_are_followed() -> None:
    model = net()
    compiled(model, backend="aot_eager")
    _equal(model, tokens())
    model.double()
    _equal(model, tokens())
    found: Run = run(model, tokens())
    assert found.output.dtype == torch.float64
