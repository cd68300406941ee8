"""The models that are trained, and their data: none has anything to do with the engine under test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.gpt import GPT, GPTConfig

CLIP = 1.0
LEARNING_RATE = 1e-3
Batch = tuple[torch.Tensor, ...]


class Workload(NamedTuple):
    """A model that returns its loss, and a source of micro-batches."""

    model: nn.Module
    batch: Callable[[torch.Generator], Batch]


class WithLoss(nn.Module):
    """A model and a squared error on top."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.body(x), y)


def gpt() -> Workload:
    """14 M parameters."""
    model = GPT(GPTConfig(vocabulary=4096, width=384, layers=6, heads=6, context=256))

    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(0, 4096, (4, 257), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload(model, batch)


def mlp() -> Workload:
    """Many small tensors: 100 Linear layers of width 64, near the identity, and targets that can be learnt at once: the
    first losses tell who does other work, and rounding does not grow from layer to layer until it looks like that."""
    body = nn.Sequential(*(layer for _ in range(100) for layer in (nn.Linear(64, 64), nn.ReLU())))
    for layer in body[::2]:
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
        layer.weight.data.add_(0.02 * torch.randn(64, 64))
    return Workload(WithLoss(body), lambda g: (torch.randn(64, 64, generator=g), torch.ones(64, 64)))


def small() -> Workload:
    """40 Linear layers of width 32: all overhead. Initialised so that gradients reach the first."""
    body = nn.Sequential(*(nn.Linear(32, 32) for _ in range(40)))
    for layer in body:
        nn.init.orthogonal_(layer.weight)
    return Workload(WithLoss(body), lambda g: (torch.randn(8, 32, generator=g), 3 * torch.randn(8, 32, generator=g)))


class SmallBlock(nn.Module):
    """A residual block of width 32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 32)
        self.down = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class SmallBlocks(nn.Module):
    """20 of them, and a squared error on top."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SmallBlock() for _ in range(20)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def blocks() -> Workload:
    """20 blocks of width 32: what a block costs whoever gathers, or would gather, one by one."""
    return Workload(SmallBlocks(), lambda g: (torch.randn(8, 32, generator=g), 3 * torch.ones(8, 32)))


def conv() -> Workload:
    """Four convolutions with batch norm, then one layer."""
    widths = [3, 32, 64, 128, 256]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 16, 10))
    return Workload(
        WithLoss(body), lambda g: (torch.randn(16, 3, 64, 64, generator=g), torch.randn(16, 10, generator=g))
    )


def wide() -> Workload:
    """64 Linear layers of width 512 on two rows: 17 M parameters, next to no activations."""
    body = nn.Sequential(*(nn.Linear(512, 512) for _ in range(64)))
    return Workload(WithLoss(body), lambda g: (torch.randn(2, 512, generator=g), torch.randn(2, 512, generator=g)))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt": gpt,
    "mlp": mlp,
    "small": small,
    "blocks": blocks,
    "conv": conv,
    "wide": wide,
}


def make(name: str) -> Workload:
    """The workload with the weights that every contender starts from."""
    torch.manual_seed(0)
    return WORKLOADS[name]()


def data(workload: Workload, rank: int) -> Callable[[int], list[Batch]]:
    """A function that gives the next so many micro-batches of `rank`, the same for every contender."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return lambda count: [workload.batch(generator) for _ in range(count)]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks: what is compiled, and what FSDP2 shards one by one; the whole where it has none."""
    blocks = getattr(model, "blocks", None)
    return [model] if blocks is None else list(blocks)
