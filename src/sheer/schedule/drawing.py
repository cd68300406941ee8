"""A timeline as a picture: boxes and texts with places in pixels, and those as SVG. Stages are rows, time is x."""

from __future__ import annotations

import math
from typing import NamedTuple
from xml.sax.saxutils import escape

from sheer.schedule.plan import Kind
from sheer.schedule.simulation import Timeline

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward of inputs",
    Kind.WEIGHT: "backward of weights",
    Kind.REDUCE: "reduce",
    Kind.STEP: "step",
}
COLOURS = {
    Kind.FORWARD: "#6aa5e3",
    Kind.BACKWARD: "#f0a04b",
    Kind.INPUT: "#f3c84b",
    Kind.WEIGHT: "#7fbf6a",
    Kind.REDUCE: "#b39ddb",
    Kind.STEP: "#9e9e9e",
}
IDLE, INK, PALE = "#eceff1", "#1c2530", "#5f6b76"

# Pixels.
_WIDTH, _NARROWEST, _ROW, _GAP = 880, 15, 30, 4
_LEFT, _RIGHT, _TOP = 76, 140, 56


class Box(NamedTuple):
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str


class Words(NamedTuple):
    """One line of text; `anchor` is start, middle or end; `y` is its middle."""

    x: float
    y: float
    text: str
    size: float
    anchor: str = "start"
    colour: str = INK
    bold: bool = False


class Picture(NamedTuple):
    """What there is to see, back to front."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    words: tuple[Words, ...]


def picture(timeline: Timeline) -> Picture:
    """Lay `timeline` out: title, one row per stage with its idle share and what it holds, time axis, legend."""
    scale = _scale(timeline)
    right = _LEFT + timeline.length * scale
    width, bottom = right + _RIGHT, _TOP + timeline.schedule.stages * (_ROW + _GAP)
    boxes, words = _rows(timeline, scale)
    words += _title(timeline, right)
    words += _axis(timeline, scale, bottom)
    legend_boxes, legend_words = _legend(timeline, bottom + 42)
    return Picture(width, bottom + 62, (*boxes, *legend_boxes), (*words, *legend_words))


def to_svg(timeline: Timeline) -> str:
    """`timeline` as a stand-alone SVG file."""
    drawn = picture(timeline)
    size = f'width="{drawn.width:.0f}" height="{drawn.height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {drawn.width:.0f} {drawn.height:.0f}" '
        'font-family="Helvetica, Arial, sans-serif">',
        f"<title>{escape(title(timeline))}</title>",
        f'<rect {size} fill="#ffffff"/>',
    ]
    for box in drawn.boxes:
        place = f'x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}"'
        lines.append(f'<rect {place} fill="{box.fill}"/>')
    for one in drawn.words:
        style = f'font-size="{one.size:g}" text-anchor="{one.anchor}" fill="{one.colour}"'
        weight = ' font-weight="bold"' if one.bold else ""
        # Not `dominant-baseline`: some viewers know none.
        lines.append(f'<text x="{one.x:.2f}" y="{one.y:.2f}" dy="0.35em" {style}{weight}>{escape(one.text)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def title(timeline: Timeline) -> str:
    """What the picture is of."""
    schedule = timeline.schedule
    numbers = [_many(schedule.stages, "stage"), _many(schedule.micro_batches, "micro-batch")]
    if schedule.chunks > 1:
        numbers.insert(1, f"{schedule.chunks} chunks each")
    return f"{schedule.name}: {', '.join(numbers)}"


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of a box: the kind's, the lighter the later the chunk."""
    white = 0.6 * chunk / max(1, chunks - 1)
    channels = (int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in channels)


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}{'es' if thing.endswith('ch') else 's'}"


def _scale(timeline: Timeline) -> float:
    """Pixels per unit of time: the usual width, or more, so that the boxes of the shortest F, B, I, W hold a number."""
    lengths = [s.end - s.start for spans in timeline.spans for s in spans if s.action.micro_batch >= 0]
    shortest = min((length for length in lengths if length > 0), default=1.0)
    usual = _WIDTH / timeline.length if timeline.length else 1.0
    return max(usual, min(_NARROWEST / shortest, 4 * usual))


def _rows(timeline: Timeline, scale: float) -> tuple[list[Box], list[Words]]:
    boxes, words = [], []
    schedule = timeline.schedule
    for stage, spans in enumerate(timeline.spans):
        y = _TOP + stage * (_ROW + _GAP)
        boxes.append(Box(_LEFT, y, timeline.length * scale, _ROW, IDLE))
        words.append(Words(_LEFT - 10, y + _ROW / 2, f"stage {stage}", 13, "end"))
        share, held = 100 * timeline.bubbles[stage], timeline.in_flight[stage]
        right = _LEFT + timeline.length * scale
        words.append(Words(right + 10, y + _ROW / 2, f"{share:.1f} % idle, holds {held}", 11, colour=PALE))
        for span in spans:
            kind, micro_batch, chunk = span.action
            x, wide = _LEFT + span.start * scale, (span.end - span.start) * scale
            if wide > 0:
                boxes.append(Box(x + 0.5, y, max(wide - 1, 0.5), _ROW, shade(kind, chunk, schedule.chunks)))
            label = str(micro_batch) if micro_batch >= 0 else kind.value
            if wide >= 6.5 * len(label):
                words.append(Words(x + wide / 2, y + _ROW / 2, label, 11, "middle"))
    return boxes, words


def _title(timeline: Timeline, right: float) -> list[Words]:
    return [
        Words(_LEFT, 26, title(timeline), 16, bold=True),
        Words(right, 26, f"bubble {100 * timeline.bubble:.1f} %", 16, "end", bold=True),
    ]


def _axis(timeline: Timeline, scale: float, y: float) -> list[Words]:
    """Times below the rows, at round numbers."""
    return [Words(_LEFT + at * scale, y + 10, f"{at:g}", 10, "middle", PALE) for at in ticks(timeline.length)]


def ticks(length: float, *, most: int = 12) -> list[float]:
    """At most so many round numbers from 0 to `length`."""
    if length <= 0:
        return [0.0]
    power = 10 ** math.floor(math.log10(length / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if length / (power * factor) < most)
    return [round(step * k, 12) for k in range(math.floor(length / step) + 1)]


def _legend(timeline: Timeline, y: float) -> tuple[list[Box], list[Words]]:
    """The kinds that take time, the chunks where there are several, and idling."""
    chunks = timeline.schedule.chunks
    taken = {s.action.kind for spans in timeline.spans for s in spans if s.end > s.start}
    entries = [(COLOURS[kind], NAMES[kind]) for kind in Kind if kind in taken]
    if chunks > 1:
        entries += [(shade(Kind.FORWARD, chunk, chunks), f"chunk {chunk}") for chunk in range(chunks)]
    boxes, words, x = [], [], float(_LEFT)
    for fill, name in [*entries, (IDLE, "idle")]:
        boxes.append(Box(x, y - 6, 12, 12, fill))
        words.append(Words(x + 18, y, name, 12))
        x += 40 + 6.6 * len(name)
    return boxes, words
