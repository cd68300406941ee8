"""Plain models to cut: none of them knows of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        if x.shape[0] > 1000:  # a block may do anything
            raise ValueError("too large")
        return x + torch.tanh(self.linear(self.norm(x)))


class Language(nn.Module):
    """A tied head registered before the embedding, positions and a scale read directly, its own loss."""

    def __init__(self, layers=3):
        super().__init__()
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.embed = nn.Embedding(11, WIDTH)
        self.head.weight = self.embed.weight
        self.position = nn.Embedding(16, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH))
        self.register_buffer("hidden", torch.rand(WIDTH), persistent=False)
        self.plain = torch.rand(WIDTH)
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(layers))})
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens, targets=None):
        _, time = tokens.shape
        x = self.embed(tokens) * self.scale + self.position.weight[:time] + self.plain
        for block in self.body["blocks"]:
            x = block(x) + self.shift
        logits = self.head(x * self.scale + self.hidden)
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Unet(nn.Module):
    """Skips over the whole depth, integers that are used late, several outputs in a dict."""

    def __init__(self, depth=3):
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(depth))
        self.up = nn.ModuleList(Mix() for _ in range(depth))

    def forward(self, x, step):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = block(x, skips.pop(), flag=True)[0]
        return {"out": x * step, "parts": (x, x.shape[0])}


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, skip, *, flag):
        assert flag
        return self.linear(torch.cat([x, skip], dim=-1)), skip


@dataclass
class Answer:
    loss: Tensor
    logits: Tensor


class Dropping(nn.Module):
    """Dropout as a function of the mode, a limit on length, one block called twice, a dataclass out."""

    def __init__(self):
        super().__init__()
        self.first = Block()
        self.shared = Block()
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x, mask=None, labels=None):
        assert x.shape[1] <= 16, "too long"
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        x = nn.functional.dropout(self.first(x), 0.5, self.training)
        for _ in range(2):
            x = self.shared(x)
        logits = self.last(x)
        loss = nn.functional.cross_entropy(logits.view(-1, 3), labels.view(-1))
        return Answer(loss=loss, logits=logits)


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.blocks[0](x)
        if x.sum() > 0:
            x = -x
        return self.blocks[1](x)
