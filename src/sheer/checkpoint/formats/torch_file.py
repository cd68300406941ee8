"""A plain state dict as `torch.save` writes it; the one format that takes as much memory as the model. Tied names
share one tensor. It is a pickle of tensors in a dict, which `torch.load` reads with `weights_only`.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from sheer.checkpoint.formats.weights import Weights, aside


def write(weights: Weights, target: Path) -> list[Path]:
    """Write all of `weights` to the file `target`; the files made."""
    state = {name: weights.tensor(name) for name in weights.listed}
    state.update({alias: state[owner] for alias, owner in weights.ties.items() if owner in state})
    with aside(target) as place, place.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return [target]
