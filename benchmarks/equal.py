"""Equal work is checked: every contender's losses against those of one plain loop in one process."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.workloads import CLIP, LEARNING_RATE, data, make

TOLERANCE = 1e-4
"""Relative, of any loss. `tests/benchmarks/test_equal.py` shows that a loop which does not clip, does not average, or
does not decay differs by far more."""


def checked_steps(workload: str) -> int:
    """How many steps tell unequal work from equal: few, since every step makes rounding larger."""
    return 4 if workload in ("gpt", "mlp") else 6


def expected(
    workload: str, *, ranks: int, accumulation: int = 1, clip: float = CLIP, alone: int = -1
) -> list[list[float]]:
    """The losses of every rank at every step, as one process computes them: the gradients of all ranks' micro-batches
    averaged, clipped, applied by AdamW. With `alone` only that rank's data are trained on, as without communication."""
    model = make(workload).model
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    sources = {rank: data(make(workload), rank) for rank in ([alone] if alone >= 0 else range(ranks))}
    losses: list[list[float]] = [[] for _ in sources]
    for _ in range(checked_steps(workload)):
        for told, source in zip(losses, sources.values(), strict=True):
            total = 0.0
            for micro_batch in source(accumulation):
                loss = model(*micro_batch) / accumulation
                (loss / len(sources)).backward()
                total += float(loss.detach())
            told.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def difference(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference of two lists of losses."""
    assert len(found) == len(wanted), (found, wanted)
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
