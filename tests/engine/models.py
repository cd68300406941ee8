"""Small models with every oddity that a training engine meets."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Odd(nn.Module):
    """Tied, frozen, zero-element, scalar, never used and sometimes used parameters; buffers; equal blocks."""

    def __init__(self, *, vocabulary: int = 31, width: int = 12, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.never = nn.Parameter(torch.full((7,), 3.0))
        self.sometimes = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor, *, branch: bool = False) -> torch.Tensor:
        self.seen += tokens.numel()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = x + self.frozen(x)
        if branch:
            x = x + self.sometimes(x)
        logits = self.head(x) * self.gain
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def odd(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd()


def batches(count: int, *, size: int, length: int = 5, seed: int = 1) -> list[torch.Tensor]:
    """`count` batches of tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 31, (size, length), generator=generator) for _ in range(count)]
