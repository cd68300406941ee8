"""A model in layers, every way to split it, and the plain loop over the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import sheer
import sheer.testing
from sheer import LayerSpec, PipelineModule, TiedLayerSpec
from tests.engine.models import Block, batches
from tests.engine.oracle import Case, Step, plain_run, values

VOCABULARY, WIDTH = 31, 12
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}


class Counted(nn.Module):
    """A layer with a buffer and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.never = nn.Parameter(torch.full((7,), 3.0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * self.gain


def logits(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, embedding.weight)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def layers(blocks: int = 4) -> list[Any]:
    """Tied over the first and the last layer; integers come in."""
    return [
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH),
        *[LayerSpec(Block, WIDTH) for _ in range(blocks)],
        LayerSpec(Counted),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=logits),
    ]


def staged(stages: int, **more: Any) -> PipelineModule:
    """This rank's stage."""
    torch.manual_seed(3)
    return PipelineModule(**{"layers": layers(), "num_stages": stages, "loss_fn": cross_entropy, **more})


def whole(**more: Any) -> PipelineModule:
    """All layers, whatever the ranks."""
    return staged(1, stage=0, **more)


def loss_of(module: nn.Module, batch: torch.Tensor, _rank: int, _number: int) -> torch.Tensor:
    """The plain loop's way to call it."""
    return cross_entropy(module(batch), batch)


def oracle(
    case: Case, data: Sequence[torch.Tensor], *, module: nn.Module | None = None
) -> tuple[nn.Module, list[Step]]:
    """A plain loop over the whole model with momentum."""
    module = whole() if module is None else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return module, plain_run(module, case, data, optimizer=optimizer, call=loss_of)


def train(engine: Any, case: Case, data: Sequence[torch.Tensor]) -> list[Step]:
    """The same through an engine's stages."""
    steps = []
    for batch in data:
        mine = [(parts[case.rank], parts[case.rank]) for parts in case.micro_batches(batch)]
        loss = engine.train_batch(iter(mine))
        assert loss.item() == engine.last_step.loss
        steps.append(Step(engine.last_step.loss, engine.last_step.grad_norm))
    return steps


def case_of(stages: int, **more: Any) -> Case:
    """This rank's case in a world split into so many stages."""
    width = sheer.testing.world_size() // stages
    return Case(world=width, rank=sheer.testing.rank() % width, extra={**SGD, **more.pop("extra", {})}, **more)


def assert_trains_as_plain(engine: Any, case: Case, *, steps: int = 2, module: nn.Module | None = None) -> None:
    """Losses, norms and this stage's state are those of the plain loop over `module` (by default `whole()`)."""
    data = batches(steps, size=case.global_batch)
    mine = train(engine, case, data)
    expected, plain = oracle(case, data, module=module)
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(plain), **CLOSE)
    assert_same_as_whole(engine.module, expected, **CLOSE)


def assert_same_as_whole(module: PipelineModule, expected: nn.Module, **tolerance: float) -> None:
    """This stage's state is the whole model's, by the names of the whole. Collective where it is sharded."""
    state = expected.state_dict()
    width = sheer.testing.world_size() // module.num_stages
    for name, value in values(module).items():
        if name.endswith("seen"):  # each data rank has seen its own part
            assert value * width == state[name]
            continue
        torch.testing.assert_close(value, state[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)
