"""What was sent: collectives and bytes, by operation."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch


class Traffic(NamedTuple):
    """One collective as it was submitted; equal lists on all ranks mean equal order."""

    op: str
    numel: int
    dtype: torch.dtype
    what: str


class Counters:
    """Always-on counts, which regression tests read: collectives and bytes, by operation.

    Bytes are what each rank must send by the theory of ring algorithms, whatever the backend does: (n-1)/n of the
    buffer for a gather or a scatter, twice that for an all-reduce.
    """

    def __init__(self) -> None:
        self.collectives: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)
        self.log: list[Traffic] | None = None
        """Set to a list to record every submission (tests, debugging); None costs nothing."""

    def count(self, op: str, tensor: torch.Tensor, world: int, what: str) -> None:
        """Note one collective over `tensor`, the full-sized buffer."""
        passes = 2 if op == "all_reduce" else 1
        self.collectives[op] += 1
        self.bytes[op] += passes * tensor.numel() * tensor.element_size() * (world - 1) // world
        if self.log is not None:
            self.log.append(Traffic(op, tensor.numel(), tensor.dtype, what))
