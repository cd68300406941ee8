"""How the engine's own time grows: with tensors, with buckets, and planning with ranks.

Engine time is what a whole step takes beyond the same forward and backward of the plain module and the same clip and
fused update of one flat tensor of as many elements. The model is one `cat` of all its tensors, so that forward and
backward are as little as autograd can do for that many. One rank: what remains is the engine's bookkeeping.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.contenders import adamw
from benchmarks.report import Result, table
from benchmarks.workloads import CLIP, LEARNING_RATE
from sheer.layout import STAGES, ParamSpec, plan

ELEMENTS = 128
"""Per tensor: the alignment of a bucket, so that flat buffers have no gaps."""


class Cat(nn.Module):
    """So many small tensors, all used."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.randn(ELEMENTS) for _ in range(count))

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.tensors)).square().mean()


class Point(NamedTuple):
    """One measurement, milliseconds."""

    tensors: int
    buckets: int
    whole: float
    model: float
    update: float

    @property
    def engine(self) -> float:
        return self.whole - self.model - self.update


def measure(count: int, *, per_bucket: int, stage: int, rounds: int) -> Point:
    """Whole step, bare forward and backward, flat update: in turns."""
    import sheer

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": per_bucket},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "gradient_clipping": CLIP,
    }
    engine = sheer.initialize(model=Cat(count), config=config)[0]
    plain, flat = Cat(count), nn.Parameter(torch.randn(count * ELEMENTS))
    flat.grad = torch.randn_like(flat)
    optimizer = adamw([flat])

    def whole() -> None:
        engine.backward(engine())
        engine.step()

    def model() -> None:
        plain().backward()
        plain.zero_grad()

    def update() -> None:
        nn.utils.clip_grad_norm_([flat], CLIP)
        optimizer.step()

    parts: list[Callable[[], None]] = [whole, model, update]
    for part in parts:
        part()
    gc.collect()
    medians = [
        statistics.median(column)
        for column in zip(*([_clock(part) for part in parts] for _ in range(rounds)), strict=True)
    ]
    buckets = len(engine.layout.buckets)
    engine.destroy()
    return Point(count, buckets, *medians)


def _clock(part: Callable[[], None]) -> float:
    begin = time.perf_counter()
    part()
    return (time.perf_counter() - begin) * 1e3


def run(*, quick: bool) -> Result:
    """By tensors with everything in few buckets, then by buckets with 1000 tensors."""
    rounds = 11 if quick else 41
    everything = 2**30
    counts = (10, 100, 1000, 10_000)
    points = [measure(count, per_bucket=everything, stage=1, rounds=rounds) for count in counts]
    points += [measure(1000, per_bucket=ELEMENTS * size, stage=1, rounds=rounds) for size in (250, 100, 25, 10)]
    rows = [
        [f"{p.tensors:,}", str(p.buckets), *(f"{ms:.2f}" for ms in (p.whole, p.model, p.update, p.engine))]
        for p in points
    ]
    lines = table(["tensors", "buckets", "whole step, ms", "forward and backward", "flat update", "engine"], rows)
    fit = _fit(points)
    lines += ["", f"Fit: engine = {fit[0]:.2f} ms + {1e3 * fit[1]:.0f} us x buckets + {1e3 * fit[2]:.2f} us x tensors."]
    return Result(lines, [p._asdict() for p in points])


def _fit(points: list[Point]) -> list[float]:
    """Least squares in relative error, so that small and large points count alike."""
    rows = torch.tensor([[1.0, p.buckets, p.tensors] for p in points], dtype=torch.float64)
    found = torch.tensor([p.engine for p in points], dtype=torch.float64)
    weight = 1.0 / found.clamp(min=0.05)
    return torch.linalg.lstsq(rows * weight[:, None], (found * weight)[:, None]).solution[:, 0].tolist()


# --- planning ---------------------------------------------------------------------------------------------------------


def planning() -> Result:
    """1024 ranks and 10 000 parameters on one core, without a process group: the layout, its fingerprint, and what
    one rank owns of it, piece by piece."""
    assert not torch.distributed.is_initialized()
    specs = [ParamSpec(f"layer{i}.weight", (1024, 64 + i % 7), torch.bfloat16, torch.float32, 0) for i in range(10_000)]
    samples = {stage: _plan(specs, stage) for stage in sorted(STAGES)}
    rows = [[str(stage), *(f"{value:.3f}" for value in seconds.values())] for stage, seconds in samples.items()]
    return Result(table(["stage", "layout, s", "fingerprint, s", "one rank's pieces, s"], rows), samples)


def _plan(specs: list[ParamSpec], stage: int) -> dict[str, float]:
    marks = [time.perf_counter()]
    layout = plan(specs, stage=STAGES[stage], world=1024, limit=40 * 10**6)
    marks.append(time.perf_counter())
    layout.digest()
    marks.append(time.perf_counter())
    owned = [list(bucket.pieces(layout.owned(bucket, 7))) for bucket in layout.buckets]
    marks.append(time.perf_counter())
    assert owned
    return {
        name: after - before
        for name, (before, after) in zip(("plan", "digest", "pieces"), pairwise(marks), strict=True)
    }
