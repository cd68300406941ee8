"""What launcher and workers say to each other: events over one pipe, one order over each worker's standard input.

Events are lines of JSON. All workers share the pipe's write end, so a line stays below PIPE_BUF and is written in one
call: lines of different workers never mix. The launcher sees the pipe's end when the last worker is gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections.abc import Iterator
from typing import Any

STOP = b"stop\n"
"""The order to save at the next step boundary and leave."""

LONGEST_TEXT = 3000
"""Bytes of an error's message that are carried, so that the event stays below PIPE_BUF (4096 on Linux)."""


class Reporter:
    """A worker's end of the event pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, event: str, **values: Any) -> None:
        """Send one event."""
        line = json.dumps({"event": event, **values}, ensure_ascii=False) + "\n"
        os.write(self._descriptor, line.encode())

    def error(self, message: str) -> None:
        """Send an error for the launcher to show."""
        self.tell("error", message=message.encode()[:LONGEST_TEXT].decode(errors="ignore"))


class Listener:
    """The launcher's end of the event pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.ended = False

    def events(self, *, patience: float) -> Iterator[dict[str, Any]]:
        """The events that have come, waiting up to `patience` seconds for the first."""
        if self.ended or not select.select([self._descriptor], [], [], patience)[0]:
            return
        chunk = os.read(self._descriptor, 1 << 16)
        self.ended = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            yield json.loads(line)


class Orders:
    """A worker's ear for the launcher: hears the order to stop, and does not outlive the launcher.

    Standard input ends when the launcher is gone, however it went. The worker leads a process group of its own, so
    that ending the group takes compilers it started along.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    @property
    def stop(self) -> bool:
        """True once the launcher has asked this worker to stop."""
        return self._stop.is_set()

    def _listen(self) -> None:
        while True:
            heard = os.read(0, 64)
            if not heard:
                os.killpg(os.getpgrp(), signal.SIGKILL)
            self._stop.set()
