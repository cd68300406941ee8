"""What the demo shows while it trains: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 5.0
"""Seconds between two lines where there is no terminal."""


class Face:
    """Turns the workers' events into something to look at. A context manager, for the bar's sake."""

    def __init__(self, console: Console, *, steps: int, tokens_per_step: int, compiles: bool) -> None:
        self._console = console
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._first = "compiling the blocks" if compiles else "first step"
        self._said_at = float("-inf")
        self._steady_since: float | None = None
        self._steady_steps = 0
        self.step = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("eta"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
            # An estimate over the last minute; over the first step's compilation it would be wrong for long.
            speed_estimate_period=60.0,
        )
        self._task = self._bar.add_task("starting", total=steps, numbers="")

    def __enter__(self) -> Face:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Show one event."""
        {"ready": self._ready, "step": self._stepped, "stopping": self._stopping}[event["event"]](event)

    def _ready(self, event: dict[str, Any]) -> None:
        size, megabytes = event["parameters"] / 1e6, event["text_bytes"] / 1e6
        self._say(f"a GPT of {size:.2f} million parameters, {megabytes:.1f} MB of text to train on")
        if event["step"]:
            self._say(f"going on from the checkpoint of step {event['step']}")
        self.step = event["step"]
        self._bar.update(self._task, completed=self.step, description=self._first)
        if not self._console.is_terminal:
            self._say(self._first)

    def _stepped(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        self.step = event["step"]
        if self._steady_since is None:
            self._steady_since = now
            # Forget the first step's time, most of which is compilation, in the estimate of what is left.
            self._bar.reset(self._task, completed=self.step, total=self._steps)
            return
        self._steady_steps += 1
        speed = self._steady_steps / (now - self._steady_since)
        tokens = f"{speed * self._tokens_per_step:,.0f} tokens/s"
        numbers = f"loss {event['loss']:.3f}  {tokens}  grad norm {event['grad_norm']:.2f}"
        self._bar.update(self._task, completed=self.step, description="training", numbers=numbers)
        if not self._console.is_terminal and (now - self._said_at > LINE_EVERY or self.step == self._steps):
            self._said_at = now
            left = (self._steps - self.step) / speed
            self._say(f"step {self.step}/{self._steps}  {numbers}  eta {left:.0f} s")

    def _stopping(self, event: dict[str, Any]) -> None:
        self._say("stopping: saving at the next step boundary (once more to end at once)")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)
