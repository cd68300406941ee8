"""A timeline for a terminal: a row per stage (and chunk), as many panels below each other as its length takes."""

from __future__ import annotations

import math
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from sheer.schedule import Kind, Span, Timeline
from sheer.schedule.drawing import IDLE, NAMES, shade, ticks, title

_MOST_PANELS = 12


class Cell(NamedTuple):
    """One character and its rich style."""

    character: str
    style: str


def print_timeline(timeline: Timeline, console: Console) -> None:
    """Print chart, legend and figures, in colours where the console has them."""
    coloured = console.color_system is not None
    columns = max(20, console.width - _margin(timeline))
    scale = _scale(timeline, columns)
    console.print(Text(f"{title(timeline)}; bubble {100 * timeline.bubble:.1f} %", style="bold"))
    total = math.ceil(round(timeline.length * scale, 6))
    rows = _rows(timeline, scale, total, fill=" " if coloured else "-")
    wide = _panel(timeline, scale, columns)
    ruler = _ruler(timeline, scale, total)
    for start in range(0, max(total, 1), wide):
        console.print(Text("\n" + " " * _margin(timeline) + ruler[start : start + wide].rstrip(), style="dim"))
        for name, cells in rows:
            line = Text(name.ljust(_margin(timeline)))
            for cell in cells[start : start + wide]:
                line.append(cell.character, style=cell.style if coloured else "")
            line.rstrip()
            console.print(line, soft_wrap=True)
    console.print(_figures(timeline, coloured=coloured))


def _margin(timeline: Timeline) -> int:
    return len(_name(timeline, timeline.schedule.stages - 1, timeline.schedule.chunks - 1)) + 1


def _name(timeline: Timeline, stage: int, chunk: int) -> str:
    return f"stage {stage}" + (f".{chunk}" if timeline.schedule.chunks > 1 else "")


def _shortest(timeline: Timeline) -> float:
    lengths = [span.end - span.start for spans in timeline.spans for span in spans]
    return min((length for length in lengths if length > 0), default=1.0)


def _scale(timeline: Timeline, columns: int) -> float:
    """Columns per unit of time: enough for the label of the shortest action, while that makes no endless chart."""
    longest = 1 + len(str(timeline.schedule.micro_batches - 1))
    wanted = longest / _shortest(timeline)
    return min(wanted, _MOST_PANELS * columns / timeline.length) if timeline.length else wanted


def _panel(timeline: Timeline, scale: float, columns: int) -> int:
    """Columns of a panel: as many as there are, cut between actions where all take whole units."""
    step = max(1, round(_shortest(timeline) * scale))
    return max(step, columns // step * step)


def _rows(timeline: Timeline, scale: float, total: int, *, fill: str) -> list[tuple[str, list[Cell]]]:
    rows = []
    for stage, spans in enumerate(timeline.spans):
        busy = [(round(span.start * scale), round(span.end * scale)) for span in spans]
        for chunk in range(timeline.schedule.chunks):
            cells = [Cell("·", f"grey50 on {IDLE}")] * total
            for start, end in busy:
                cells[start:end] = [Cell(" ", "")] * (end - start)
            for span, (start, end) in zip(spans, busy, strict=True):
                if span.action.chunk == chunk:
                    cells[start:end] = _box(timeline, span, end - start, fill)
            rows.append((_name(timeline, stage, chunk), cells))
    return rows


def _box(timeline: Timeline, span: Span, wide: int, fill: str) -> list[Cell]:
    kind, micro_batch, chunk = span.action
    label = kind.value + (str(micro_batch) if micro_batch >= 0 else "")
    label = label if len(label) <= wide else label[:1]
    style = f"black on {shade(kind, chunk, timeline.schedule.chunks)}"
    return [Cell(character, style) for character in label.ljust(wide, fill)[:wide]]


def _ruler(timeline: Timeline, scale: float, total: int) -> str:
    line = [" "] * (total + 12)
    for at in ticks(timeline.length, most=max(3, total // 8)):
        column = round(at * scale)
        label = f"{at:g}"
        line[column : column + len(label)] = label
    return "".join(line)


def _figures(timeline: Timeline, *, coloured: bool) -> Text:
    """The legend, and per stage the idle share and what is held."""
    kinds = [
        kind for kind in Kind if any(s.action.kind is kind and s.end > s.start for some in timeline.spans for s in some)
    ]
    said = Text("\n")
    for kind in kinds:
        said.append(f" {kind.value} ", style=f"black on {shade(kind, 0, 1)}" if coloured else "")
        said.append(f" {NAMES[kind]}  ")
    said.append("· idle\n")
    said.append(f"idle per stage, %: {' '.join(f'{100 * share:.1f}' for share in timeline.bubbles)}\n")
    said.append(f"held at most: {' '.join(map(str, timeline.in_flight))}")
    said.append(" micro-batches" if timeline.schedule.chunks == 1 else " micro-batches, one counted per chunk")
    return said
