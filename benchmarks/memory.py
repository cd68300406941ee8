"""Model-state bytes against the ZeRO formula, and what a step needs beyond them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.contenders import CONTENDERS
from benchmarks.report import Result, table
from benchmarks.ring import FailedError, Ring
from benchmarks.workloads import make

RANKS = 2


class Bytes(NamedTuple):
    """Per parameter."""

    param: int
    grad: int
    optim: int
    """Adam's two moments, and the fp32 master beside low-precision parameters."""

    def at(self, stage: int, ranks: int) -> float:
        """The ZeRO formula (arXiv 1910.02054, section 5)."""
        return (
            self.param / (ranks if stage >= 3 else 1)
            + self.grad / (ranks if stage >= 2 else 1)
            + self.optim / (ranks if stage >= 1 else 1)
        )


class Precision(NamedTuple):
    """A config and what its tensors take."""

    name: str
    config: Mapping[str, Any]
    bytes: Bytes


FP32 = Precision("fp32", {}, Bytes(4, 4, 8))
BF16 = Precision(
    "bf16, gradients in bf16", {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, Bytes(2, 2, 12)
)
BF16_WIDE = Precision("bf16, gradients in fp32", {"bf16": {"enabled": True}}, Bytes(2, 4, 12))


def state(*, workload: str = "gpt") -> Result:
    """Held by each contender when gradients are complete and the update begins."""
    count = sum(parameter.numel() for parameter in make(workload).model.parameters())
    cases = [
        *((name, stage, FP32) for name, stage in [("DDP", 0), ("FSDP2, resharding", 3)]),
        *((f"DeepSpeed stage {stage}", stage, FP32) for stage in (0, 1, 2, 3)),
        *(
            (name, int(name[-1]), precision)
            for precision in (FP32, BF16, BF16_WIDE)
            for name, one in CONTENDERS.items()
            if one.ours
        ),
    ]
    rows, samples = [], {}
    for name, stage, precision in cases:
        theory = precision.bytes.at(stage, RANKS)
        cells = _state(name, workload, precision.config, count)
        samples[f"{name}, {precision.name}"] = cells
        if isinstance(cells, str):
            rows.append([name, precision.name, f"{theory:.1f}", cells, "", ""])
        else:
            held, idle = cells
            rows.append(
                [
                    name,
                    precision.name,
                    f"{theory:.1f}",
                    f"{held:.2f}",
                    f"{100 * (held / theory - 1):+.1f} %",
                    f"{idle:.2f}",
                ]
            )
    header = ["contender", "precision", "formula", "held", "more", "idle, kept for reuse"]
    wrong = tuple(name for name, cells in samples.items() if isinstance(cells, str))
    return Result(
        [f"Bytes per parameter and rank, {RANKS} ranks, {workload}.", "", *table(header, rows)], samples, wrong=wrong
    )


def _state(name: str, workload: str, config: Mapping[str, Any], count: int) -> tuple[float, float] | str:
    if not CONTENDERS[name].installed:
        return "not installed"
    ring = Ring(name, ranks=RANKS)
    try:
        ring.build(workload=workload, config=config)
        answers = ring.ask("state")
    except FailedError as error:
        return f"failed: {error}"
    finally:
        ring.stop()
    return max(answer["held"] for answer in answers) / count, max(answer["idle"] for answer in answers) / count


def beyond() -> Result:
    """What a step allocates above rest, against the size of a bucket; activations here are next to nothing."""
    sizes = [2**18, 2**19, 2**20, 2**21]
    rows, samples = [], {}
    for name in [name for name, one in CONTENDERS.items() if one.ours]:
        ring = Ring(name, ranks=RANKS)
        cells = []
        try:
            for size in sizes:
                ring.build(workload="wide", config={"zero_optimization": {"reduce_bucket_size": size}})
                cells.append(max(answer["bytes"] for answer in ring.ask("peak")))
                ring.close()
        finally:
            ring.stop()
        samples[name] = dict(zip(sizes, cells, strict=True))
        rows.append(
            [
                name,
                *(f"{found / 2**20:.1f} ({found / (4 * size):.1f})" for size, found in zip(sizes, cells, strict=True)),
            ]
        )
    header = ["MiB (buckets)", *(f"{size / 2**20:g} Mi elements" for size in sizes)]
    return Result(["Peak above rest during a step, by `reduce_bucket_size`.", "", *table(header, rows)], samples)
