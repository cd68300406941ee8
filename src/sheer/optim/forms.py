"""How optimizer state relates to the parameter that it is of."""

from __future__ import annotations

from typing import Any

import torch


class StateForm:
    """How one kind of optimizer state relates to its parameter (values of `FlatOptimizer.forms`)."""

    ELEMENT = "element"
    """One value per element of the parameter; sharded with it."""
    SCALAR = "scalar"
    """One 0-d tensor per parameter, e.g. Adam's step."""
    WHOLE = "whole"
    """A tensor of its own shape per parameter, e.g. Adafactor's row statistics."""
    NUMBER = "number"
    """A Python number per parameter."""


def form_of(value: object, owner: torch.Tensor) -> str | None:
    """The `StateForm` of a state of the tensor `owner`; None for what cannot be kept."""
    if isinstance(value, torch.Tensor):
        if value.shape == owner.shape and value.dim() > 0:
            return StateForm.ELEMENT
        return StateForm.SCALAR if value.dim() == 0 else StateForm.WHOLE
    return StateForm.NUMBER if isinstance(value, (int, float)) else None


def as_tensor(value: Any) -> torch.Tensor:
    """A state that is not per element; a Python float keeps its 64 bits."""
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
