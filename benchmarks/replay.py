"""gloo's own share: the collectives of one step with nothing else running."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.report import Result, Spread, table
from sheer.comm import Lane, Ticket, Traffic, data_axis


def bare(sent: Sequence[Traffic], *, times: int) -> float:
    """Median seconds for the collectives in `sent`, submitted in order, then waited for. Collective."""
    axis = data_axis()
    lane = Lane(axis)
    buffers = [torch.zeros(entry.numel, dtype=entry.dtype) for entry in sent]

    def submit(entry: Traffic, buffer: torch.Tensor) -> Ticket:
        if entry.op == "all_reduce":
            return lane.all_reduce(buffer, what=entry.what)
        own = buffer.view(axis.size, -1)[axis.rank]
        move = {
            "reduce_scatter": lambda: lane.reduce_scatter(own, buffer, what=entry.what),
            "all_gather": lambda: lane.all_gather(buffer, own, what=entry.what),
        }[entry.op]
        return move()

    seconds = []
    for _ in range(times):
        torch.distributed.barrier()
        begin = time.perf_counter()
        for ticket in [submit(entry, buffer) for entry, buffer in zip(sent, buffers, strict=True)]:
            ticket.wait()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def run(*, workloads: Sequence[str], rounds: int) -> Result:
    """Ours and the raw loop in turns with the bare collectives of ours."""
    from benchmarks.contenders import OUR_STAGES

    rows, samples = [], {}
    for workload in workloads:
        for stage in OUR_STAGES:
            samples[f"{workload} {stage}"] = found = _one(workload, stage, rounds)
            share = Spread.of([replayed / raw for raw, _, replayed in found])
            middle = [f"{statistics.median(column) * 1e3:.1f}" for column in zip(*found, strict=True)]
            rows.append([workload, str(stage), *middle, f"{share.median:.3f}", f"{share.low:.3f} - {share.high:.3f}"])
    header = [
        "model",
        "stage",
        "raw loop, ms",
        "ours, ms",
        "its collectives alone, ms",
        "alone / raw loop",
        "10 - 90 %",
    ]
    return Result(table(header, rows), samples)


def _one(workload: str, stage: int, rounds: int) -> list[tuple[float, float, float]]:
    from benchmarks.contenders import RAW
    from benchmarks.ring import Ring

    raw, ours = Ring(RAW, ranks=2), Ring(f"Sheer stage {stage}", ranks=2)
    try:
        for ring in (raw, ours):
            ring.build(workload=workload)
            ring.turn(2)
        return [
            (raw.turn(2).seconds, ours.turn(2).seconds, max(a["seconds"] for a in ours.ask("replay", times=5)))
            for _ in range(rounds)
        ]
    finally:
        raw.stop()
        ours.stop()
