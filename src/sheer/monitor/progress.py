"""The progress of a run for people: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

# How many of the latest steps the pace is taken from: enough to be steady, few enough to forget compilation.
_PACE_STEPS = 50


class Progress:
    """Shows step, loss, tokens/s, gradient norm, learning rate and time left. A `Monitor`.

    `total` is the last step (None: unknown, so no time left); `tokens_per_step` counts the tokens of one optimizer step
    over all ranks and is left out where unknown. On a terminal the bar redraws itself; elsewhere a line is written at
    most every `interval` seconds, and for the last step. `clock` gives seconds.
    """

    def __init__(
        self,
        total: int | None,
        *,
        tokens_per_step: int | None = None,
        stream: TextIO | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._tokens_per_step = tokens_per_step
        self._pace = _Pace(clock)
        stream = sys.stderr if stream is None else stream
        self._face: _Face = _Bar(total, stream) if stream.isatty() else _Lines(total, stream, interval, clock)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show `values` as those of `step`; "loss", "grad_norm" and "lr" are the names that are shown."""
        self._pace.note(step)
        self._face.show(step, self._describe(step, values))

    def close(self) -> None:
        """Leave the last state standing and give the terminal back."""
        self._face.close()

    def _describe(self, step: int, values: Mapping[str, float]) -> str:
        """The numbers, the dearest first: a narrow terminal cuts off the end."""
        rate = self._pace.steps_per_second()
        parts: list[str] = []
        if "loss" in values:
            parts.append(f"loss {values['loss']:.4f}")
        if rate and self._tokens_per_step:
            parts.append(f"{_short(rate * self._tokens_per_step)} tokens/s")
        if "grad_norm" in values:
            parts.append(f"grad norm {values['grad_norm']:.3f}")
        if rate and self._total is not None:
            parts.append(f"ETA {_clock_time(max(0, self._total - step) / rate)}")
        if "lr" in values:
            parts.append(f"lr {values['lr']:.2e}")
        return "  ".join(parts)


class _Pace:
    """Steps per second over the latest steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=_PACE_STEPS)

    def note(self, step: int) -> None:
        self._seen.append((self._clock(), step))

    def steps_per_second(self) -> float | None:
        """None until two steps tell."""
        (first_time, first_step), (last_time, last_step) = self._seen[0], self._seen[-1]
        if last_time <= first_time or last_step <= first_step:
            return None
        return (last_step - first_step) / (last_time - first_time)


class _Face(Protocol):
    """One way of showing a step and its text."""

    def show(self, step: int, text: str) -> None:
        """Show `text` for `step`."""

    def close(self) -> None:
        """Show nothing more."""


class _Bar:
    """A bar that redraws itself. rich is imported here only, so that importing sheer stays fast."""

    def __init__(self, total: int | None, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        # The text takes what the bar and the count leave, and is the one that is cut.
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        text = TextColumn("{task.description}", table_column=rest)
        columns = (BarColumn(bar_width=10), MofNCompleteColumn(), text)
        self._rich: Any = RichProgress(*columns, console=Console(file=stream), expand=True)
        self._task = self._rich.add_task("", total=total)
        self._rich.start()

    def show(self, step: int, text: str) -> None:
        self._rich.update(self._task, completed=step, description=text)

    def close(self) -> None:
        self._rich.stop()


class _Lines:
    """Plain lines, at most one every `interval` seconds, and the last one in any case."""

    def __init__(self, total: int | None, stream: TextIO, interval: float, clock: Callable[[], float]) -> None:
        self._of = "" if total is None else f"/{total}"
        self._stream, self._interval, self._clock = stream, interval, clock
        self._last_time: float | None = None
        self._waiting: str | None = None

    def show(self, step: int, text: str) -> None:
        self._waiting = f"step {step}{self._of}  {text}".rstrip()
        now = self._clock()
        if self._last_time is None or now - self._last_time >= self._interval:
            self._last_time = now
            self._flush()

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._waiting is not None:
            self._stream.write(self._waiting + "\n")
            self._stream.flush()
            self._waiting = None


def _short(number: float) -> str:
    """Three digits and a unit: 950, 12.3k, 4.56M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:  # what three digits round up to the next unit
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _clock_time(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any: 1:05, 2:00:31."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
