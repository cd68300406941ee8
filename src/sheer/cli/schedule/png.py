"""A timeline as a PNG, by matplotlib."""

from __future__ import annotations

from pathlib import Path

from sheer.errors import UsageError
from sheer.schedule import Timeline
from sheer.schedule.drawing import picture

_DPI = 96  # an inch of the picture is so many of its pixels
_SHARPNESS = 2


def write_png(timeline: Timeline, path: Path) -> None:
    """Write the picture that `to_svg` makes to `path`, in twice as many pixels."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ModuleNotFoundError as error:
        raise UsageError("a PNG needs matplotlib: pip install 'sheer[demo]', or write an SVG with --svg") from error
    drawn = picture(timeline)
    figure = Figure(figsize=(drawn.width / _DPI, drawn.height / _DPI), dpi=_DPI * _SHARPNESS)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawn.width), ylim=(drawn.height, 0))
    axes.axis("off")
    for box in drawn.boxes:
        axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, facecolor=box.fill, linewidth=0))
    sides = {"start": "left", "middle": "center", "end": "right"}
    for one in drawn.words:
        axes.text(
            one.x,
            one.y,
            one.text.replace("$", r"\$"),
            fontsize=one.size * 72 / _DPI,
            horizontalalignment=sides[one.anchor],
            verticalalignment="center_baseline",
            color=one.colour,
            fontweight="bold" if one.bold else "normal",
        )
    figure.savefig(path, format="png")
