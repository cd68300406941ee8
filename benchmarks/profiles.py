"""Where a step's time goes: torch's profiler and cProfile, a table per rank and contender."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def write_profiles(step: Callable[[Any], object], batches: list[Any], *, folder: str, name: str) -> None:
    """Train on half of `batches` under each profiler; the tables go to `folder`."""
    half = len(batches) // 2
    stem = f"{name.lower().replace(' ', '-')}-rank{torch.distributed.get_rank()}"
    with profile(activities=[ProfilerActivity.CPU]) as kernels:
        for batch in batches[:half]:
            step(batch)
    averages = kernels.key_averages()
    python = cProfile.Profile()
    python.enable()
    for batch in batches[half:]:
        step(batch)
    python.disable()
    text = io.StringIO()
    pstats.Stats(python, stream=text).sort_stats("tottime").print_stats(40)
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"{stem}-torch.txt").write_text(averages.table(sort_by="self_cpu_time_total", row_limit=40))
    Path(folder, f"{stem}-python.txt").write_text(text.getvalue())


def run(workload: str, *, names: list[str], ranks: int, steps: int, folder: Path) -> None:
    """Profile each of `names` in processes of its own."""
    from benchmarks.ring import Ring

    for name in names:
        ring = Ring(name, ranks=ranks)
        ring.build(workload=workload)
        ring.ask("profile", folder=str(folder), steps=steps)
        ring.stop()
    print("\n".join(str(path) for path in sorted(folder.glob("*.txt"))))
