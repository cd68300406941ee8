"""What every monitor offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Monitor(Protocol):
    """Takes the numbers of one step after another. Steps rise; a resumed run starts again at an earlier one."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` (by name, such as "loss") as those of optimizer step `step`."""

    def close(self) -> None:
        """Finish what is being written. May be called twice; nothing is written afterwards."""
