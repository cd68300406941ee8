"""The fp16 loss scale: a state machine over "did this step's gradients overflow", without tensors.

fp16 gradients below 6e-8 vanish, so the loss is multiplied by a scale before the backward pass and the gradients are
divided by it before the update (Micikevicius et al. 2018, arXiv 1710.03740).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from sheer.errors import CheckpointError, ConfigError, UsageError

_FACTOR = 2.0


class Scaling(enum.Enum):
    """How the scale moves."""

    DYNAMIC = "dynamic"
    """Falls on overflow, grows after a window of steps without one."""
    STATIC = "static"
    """Stays; a step that overflows is skipped all the same."""


class LossScale:
    """The current scale, moved by `update` once per optimizer step. Semantics and defaults are DeepSpeed's.

    Dynamic: an overflow first uses up `hysteresis`, one by one; with 1 left, every overflow halves the scale, down to
    `min_scale`. A step without overflow, and then every `window` more in a row, double it and restore the hysteresis;
    with `consecutive_hysteresis`, every step without overflow restores it.
    """

    def __init__(
        self,
        scale: float,
        *,
        scaling: Scaling = Scaling.DYNAMIC,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
    ) -> None:
        least = {"window": (window, 1), "hysteresis": (hysteresis, 1)}
        for name, (value, bound) in least.items():
            if value < bound:
                raise ConfigError(f"loss scale {name}={value!r}: at least {bound} is needed.")
        if not 0.0 < min_scale < float("inf"):
            raise ConfigError(f"min_loss_scale={min_scale!r}: a number above 0 is needed.")
        if not 0.0 < scale < float("inf"):
            raise ConfigError(f"loss_scale={scale!r}: a finite number above 0 is needed.")
        if scaling is Scaling.DYNAMIC and scale < min_scale:
            raise ConfigError(
                f"The loss scale starts at {scale:g}, below min_loss_scale={min_scale:g}. Raise the start."
            )
        self.scaling = scaling
        self._scale = float(scale)
        self._window = window
        self._hysteresis = hysteresis
        self._consecutive = consecutive_hysteresis
        self._min_scale = float(min_scale)
        self._good_steps = 0
        self._hysteresis_left = hysteresis

    @property
    def scale(self) -> float:
        """What the next backward pass multiplies the loss by."""
        return self._scale

    def update(self, overflow: bool) -> None:
        """Tell whether the last step's gradients were non-finite (and the step skipped).

        Raises UsageError when the scale would have to fall below its minimum: training has diverged.
        """
        if self.scaling is Scaling.STATIC:
            return
        if overflow:
            self._shrink()
        else:
            self._grow()

    def state_dict(self) -> dict[str, Any]:
        """Everything that `update` moves, as JSON."""
        return {
            "scaling": self.scaling.value,
            "scale": self._scale,
            "good_steps": self._good_steps,
            "hysteresis_left": self._hysteresis_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, within this run's settings.

        Only a dynamic state moves a dynamic scale. Where the run that saved or the one that loads is static, this
        run's configured scale stands. Raises CheckpointError, and changes nothing, for a state that lacks a field.
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise CheckpointError(f"The saved loss scale lacks {missing}; it has {sorted(state)}.")
        if self.scaling.value != state["scaling"] or self.scaling is Scaling.STATIC:
            return
        self._scale = max(float(state["scale"]), self._min_scale)
        self._good_steps = int(state["good_steps"])
        self._hysteresis_left = min(int(state["hysteresis_left"]), self._hysteresis)

    def _shrink(self) -> None:
        self._good_steps = 0
        if self._hysteresis_left > 1:
            self._hysteresis_left -= 1
            return
        if self._scale <= self._min_scale:
            raise UsageError(
                f"The gradients overflowed again with the loss scale at its minimum, {self._min_scale:g}: training "
                "has diverged, or the model or data gives NaN or Inf whatever the scale. Go back to a checkpoint and "
                "lower the learning rate, set gradient_clipping, look at the parameter named by the overflow warning, "
                "use bf16 where the device has it, or lower fp16.min_loss_scale if it is above 1."
            )
        self._scale = max(self._scale / _FACTOR, self._min_scale)

    def _grow(self) -> None:
        self._good_steps += 1
        # As in DeepSpeed the window opens after the first good step, so the first doubling takes window + 1 of them.
        window_is_over = self._good_steps > 1 and (self._good_steps - 1) % self._window == 0
        if self._consecutive or window_is_over:
            self._hysteresis_left = self._hysteresis
        if window_is_over:
            self._scale *= _FACTOR


def build_loss_scale(
    *,
    loss_scale: float = 0.0,
    initial_scale_power: int = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1.0,
) -> LossScale:
    """The loss scale of a config's `fp16` section: `loss_scale` 0 is dynamic from 2**initial_scale_power."""
    if loss_scale:
        return LossScale(loss_scale, scaling=Scaling.STATIC)
    return LossScale(
        2.0**initial_scale_power,
        window=loss_scale_window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive_hysteresis,
        min_scale=min_loss_scale,
    )
