"""A plain state dict as `torch.save` writes it; the one format that takes as much memory as the model. Tied names
share one tensor. It is a pickle of tensors in a dict, which `torch.load` reads with `weights_only`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from sheer.checkpoint.formats.foreign import Foreign, tied_names, whole
from sheer.checkpoint.formats.pickles import read_pickle
from sheer.checkpoint.formats.weights import Weights, aside, without_wrappers
from sheer.errors import CheckpointError


def write(weights: Weights, target: Path) -> list[Path]:
    """Write all of `weights` to the file `target`; the files made."""
    state = {name: weights.tensor(name) for name in weights.listed}
    state.update({alias: state[owner] for alias, owner in weights.ties.items() if owner in state})
    with aside(target) as place, place.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return [target]


def find(place: Path, tag: str | None) -> Path | None:
    """Any file: other formats are told apart before."""
    return place if tag is None and place.is_file() else None


def read(path: Path, groups: Sequence[Sequence[str]] | None = None) -> Foreign:
    """The state dict in the file `path`, by the unpickler that runs no code; mapped where the file is a zip archive.

    One that stands under "state_dict" or "model" beside other things is found there, and said.
    """
    said: list[str] = []
    found = read_pickle(path)
    for key in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            left = sorted(str(other) for other in found if other != key)
            said.append(f"took what stands under {key!r}" + (f"; left {', '.join(left)}" if left else ""))
            found = found[key]
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{path} holds a {type(found).__name__}, no state dict of names to tensors.")
    strange = [key for key, value in found.items() if not isinstance(key, str) or not isinstance(value, torch.Tensor)]
    if strange:
        raise CheckpointError(f"{path}: {strange[0]!r} is a {type(found[strange[0]]).__name__}, not a named tensor.")
    names = without_wrappers(found, said)
    own = {names[name]: tensor for name, tensor in found.items()}
    ties = tied_names(own)
    return Foreign([whole("param", name, tensor) for name, tensor in own.items() if name not in ties], ties, said)
