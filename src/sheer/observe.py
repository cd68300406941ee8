"""What a run says about itself: the logger, sentences said once, and the result of a step."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("sheer")


def ensure_handler() -> None:
    """Let the engine's INFO lines be seen where nobody has set logging up. Called by `initialize`, never by import."""
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s] sheer: %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class Teller:
    """Says each warning once, on one rank. One per engine, so that nothing is remembered between engines."""

    def __init__(self, *, speaks: bool = True) -> None:
        self._speaks = speaks
        self._said: set[str] = set()

    def warn_once(self, key: str, message: str) -> None:
        """Log `message` as a warning the first time `key` is used."""
        if key in self._said:
            return
        self._said.add(key)
        self.warn(message)

    def warn(self, message: str) -> None:
        """Log `message` as a warning."""
        if self._speaks:
            logger.warning(message)

    def info(self, message: str) -> None:
        """Log `message` at INFO."""
        if self._speaks:
            logger.info(message)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    `loss` and `grad_norm` are read from the device the first time they are asked for, so that a step which nobody
    looks at costs no host synchronisation.
    """

    step: int
    """Optimizer steps done so far, this one included (skipped ones are not counted)."""
    lr: tuple[float, ...]
    """Learning rate of every parameter group, as used by this step."""
    skipped: bool
    """True when a non-finite gradient made the step a no-op."""
    loss_scale: float
    """The fp16 loss scale this step's gradients carried; 1.0 at other precisions."""
    micro_batches: int
    """How many micro-batches this step averaged over, on each rank."""
    norm_tensor: torch.Tensor | None = field(repr=False, default=None)
    loss_tensor: torch.Tensor | None = field(repr=False, default=None)

    @cached_property
    def grad_norm(self) -> float | None:
        """Global 2-norm of the averaged gradient before clipping; None where it was not computed."""
        return None if self.norm_tensor is None else float(self.norm_tensor)

    @cached_property
    def loss(self) -> float | None:
        """Mean of this step's losses over micro-batches and ranks; None where `backward` saw none."""
        return None if self.loss_tensor is None else float(self.loss_tensor)

    def values(self) -> dict[str, float]:
        """The numbers a monitor records; reads them from the device."""
        found = {"lr": self.lr[0] if self.lr else None, "grad_norm": self.grad_norm, "loss": self.loss}
        if self.loss_scale != 1.0:
            found["loss_scale"] = self.loss_scale
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        loss = "" if self.loss is None else f" loss {self.loss:.4f}"
        norm = "" if self.grad_norm is None else f" grad norm {self.grad_norm:.4f}"
        rates = ", ".join(f"{lr:.3e}" for lr in self.lr)
        return f"step {self.step}{loss}{norm} lr {rates}{' (skipped)' if self.skipped else ''}"
