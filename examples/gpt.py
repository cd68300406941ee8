"""A byte-level GPT in plain PyTorch: what a user brings to the engine. It knows nothing of it.

GPT-2's shape (Radford et al. 2019): pre-norm blocks, learned positions, the output layer tied to the embedding, and
residual projections initialised smaller the deeper the model is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

VOCABULARY = 256
"""One token per byte value."""


@dataclass(frozen=True)
class GPTConfig:
    """The size of the model. `width` must be a multiple of `heads`."""

    vocabulary: int = VOCABULARY
    context: int = 128
    width: int = 192
    layers: int = 4
    heads: int = 6


class Attention(nn.Module):
    """Causal self-attention over [batch, time, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> [batch, time, width]."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """One transformer layer: attention, then a two-layer MLP, each added to its own input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.shrink = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> [batch, time, width]."""
        x = x + self.attention(self.norm1(x))
        return x + self.shrink(nn.functional.gelu(self.expand(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """The language model: tokens in, the loss or the next token's logits out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ValueError(f"width {config.width} is not a multiple of heads {config.heads}")
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation: N(0, 0.02); projections into the residual stream 1/sqrt(2 layers) of that."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for residual in (block.attention.out, block.shrink):
                nn.init.normal_(residual.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, time, 256] for `tokens` [batch, time]; with `targets` the mean cross-entropy in nats."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(
    model: GPT, prompt: bytes, *, count: int, temperature: float = 0.8, generator: torch.Generator | None = None
) -> bytes:
    """`prompt` (at least one byte) continued by `count` sampled bytes."""
    device = model.embed.weight.device
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        logits = model(tokens[:, -model.config.context :])[:, -1].float()
        chances = torch.softmax(logits / temperature, dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return bytes(tokens[0].tolist())
