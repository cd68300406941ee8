"""What a suite found, as tables in `docs/benchmarks.md` and as a picture."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "benchmarks.md"


class Spread(NamedTuple):
    """Median, 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        tenth = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth])


class Bar(NamedTuple):
    """One line of the picture."""

    name: str
    spread: Spread
    ours: bool


class Result(NamedTuple):
    """What one suite found."""

    lines: list[str]
    """Markdown."""
    samples: Any
    """Raw figures, for `--json`."""
    bars: tuple[Bar, ...] = ()
    wrong: tuple[str, ...] = ()
    """Contenders whose work was not equal, or that failed; the command exits with an error if one is ours."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def machine() -> list[str]:
    """Where this was measured."""
    versions = ", ".join(_version(name) for name in ("torch", "accelerate", "lightning-fabric", "deepspeed", "numpy"))
    return [
        f"Machine: {_processor()}, {os.cpu_count()} cores, {_memory()} of memory, {platform.system()} "
        f"{platform.release()}; one thread per rank, gloo over the loopback interface. Python "
        f"{platform.python_version()}, {versions}. Nothing here was measured on an accelerator."
    ]


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def write(name: str, lines: Sequence[str], *, page: Path = PAGE) -> None:
    """Replace what stands between the markers of `name`."""
    text = page.read_text()
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"{page} has no place for {name!r}: it needs the lines {begin.strip()} and {end}")
    before, rest = text.split(begin, 1)
    page.write_text(before + begin + "\n".join(lines) + "\n" + end + rest.split(end, 1)[1])


# --- the picture ------------------------------------------------------------------------------------------------------

_ROW, _LEFT, _WIDTH, _RIGHT = 26, 210, 460, 90


def picture(title: str, bars: Sequence[Bar]) -> str:
    """Horizontal bars with their spread, as SVG; a line stands at 1.0."""
    scale = _WIDTH / max(bar.spread.high for bar in bars)
    height = 44 + _ROW * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="100%" height="100%" fill="white"/><text x="10" y="20" font-weight="bold">{title}</text>',
    ]
    for number, bar in enumerate(bars):
        parts += _bar(bar, 34 + _ROW * number, scale)
    one = _LEFT + scale
    parts.append(f'<line x1="{one:.1f}" x2="{one:.1f}" y1="30" y2="{height - 8}" stroke="black" stroke-dasharray="3"/>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(bar: Bar, top: int, scale: float) -> list[str]:
    low, high, middle = _LEFT + bar.spread.low * scale, _LEFT + bar.spread.high * scale, top + 9
    return [
        f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{bar.name}</text>',
        f'<rect x="{_LEFT}" y="{top}" width="{bar.spread.median * scale:.1f}" height="18" '
        f'fill="{"#2a6f97" if bar.ours else "#b8c4cc"}"/>',
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="black"/>',
        f'<text x="{high + 6:.1f}" y="{top + 13}">{bar.spread.median:.2f}</text>',
    ]
