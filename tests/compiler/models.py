"""Small models and the comparison with eager that all tests of this room use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from sheer.compiler import Compiler
from sheer.observe import Teller


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, depth: int = 3, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Listener(Teller):
    """Keeps what was warned of (`said`) and what was only told (`told`)."""

    def __init__(self) -> None:
        super().__init__(speaks=False)
        self.said: list[str] = []
        self.told: list[str] = []

    def warn_once(self, key: str, message: str) -> None:
        if key not in self._said:
            self.said.append(message)
        super().warn_once(key, message)

    def info(self, message: str) -> None:
        self.told.append(message)


class Run(NamedTuple):
    output: torch.Tensor
    grads: dict[str, torch.Tensor]


def tokens(batch: int = 4, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, (batch, 5), generator=torch.Generator().manual_seed(seed))


def net(depth: int = 3, *, seed: int = 0, **kwargs: Any) -> Net:
    torch.manual_seed(seed)
    return Net(depth, **kwargs)


def compiled(module: nn.Module, *, backend: Any = "eager", **kwargs: Any) -> Compiler:
    """`module`, compiled in place, with a `Listener` as teller."""
    compiler = Compiler(module, backend=backend, teller=kwargs.pop("teller", None) or Listener(), **kwargs)
    compiler.enable()
    return compiler


def run(module: nn.Module, *args: Any, call: Callable[..., Any] | None = None) -> Run:
    """One forward and backward; `call` replaces `module(*args)`."""
    module.zero_grad()
    output = (module if call is None else call)(*args)
    output.float().pow(2).mean().backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return Run(output.detach().clone(), grads)


def assert_same(found: Run, wanted: Run, **tolerance: float) -> None:
    """Equal bit by bit unless a tolerance is given (code generation may order sums differently)."""
    tolerance = tolerance or {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(found.output, wanted.output, **tolerance)
    assert found.grads.keys() == wanted.grads.keys()
    for name, grad in wanted.grads.items():
        torch.testing.assert_close(found.grads[name], grad, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def twin(module: nn.Module) -> nn.Module:
    """A plain module with the same weights."""
    return copy.deepcopy(module)
