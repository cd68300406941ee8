"""What the demo shows while it trains: what it waits for, then the progress of the steps."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.status import Status

from sheer.monitor import Progress


class Face:
    """Turns the workers' events into something to look at. A context manager, so that the terminal is given back."""

    def __init__(self, console: Console, *, steps: int, tokens_per_step: int, compiles: bool) -> None:
        self._console = console
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._first = "compiling the blocks" if compiles else "the first step"
        self._waiting: Status | None = None
        self._progress: Progress | None = None

    def __enter__(self) -> Face:
        self._wait_for("starting the workers")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rest()

    def show(self, event: dict[str, Any]) -> None:
        """Show one event."""
        {"ready": self._ready, "step": self._stepped, "stopping": self._stopping}[event["event"]](event)

    def _ready(self, event: dict[str, Any]) -> None:
        size, megabytes = event["parameters"] / 1e6, event["text_bytes"] / 1e6
        self._say(f"a GPT of {size:.2f} million parameters, {megabytes:.1f} MB of text to train on")
        if event["step"]:
            self._say(f"going on from the checkpoint of step {event['step']}")
        self._wait_for(self._first)

    def _stepped(self, event: dict[str, Any]) -> None:
        if self._waiting:
            self._rest()
            self._progress = Progress(self._steps, tokens_per_step=self._tokens_per_step, stream=sys.stdout)
        if self._progress:
            self._progress.write(event["step"], {name: event[name] for name in ("loss", "grad_norm", "lr")})

    def _stopping(self, event: dict[str, Any]) -> None:
        self._rest()
        self._say("stopping: saving at the next step boundary (once more to end at once)")

    def _wait_for(self, what: str) -> None:
        self._rest()
        self._waiting = Status(what, console=self._console)
        self._waiting.start()
        if not self._console.is_terminal:
            self._say(what)

    def _rest(self) -> None:
        """Give the terminal back."""
        if self._waiting:
            self._waiting.stop()
        if self._progress:
            self._progress.close()
        self._waiting = self._progress = None

    def _say(self, text: str) -> None:
        self._console.print(text)
