"""A plain state dict as `torch.save` writes it; the one format that takes as much memory as the model. Tied names
share one tensor. It is a pickle of tensors in a dict, which `torch.load` reads with `weights_only`.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import torch

from sheer.checkpoint.formats.weights import Foreign, Weights, aside, without_wrappers
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


def read(path: Path) -> Foreign:
    """The state dict in the file `path`, by the unpickler that runs no code; mapped where the file is a zip archive.

    One that stands under "state_dict" or "model" beside other things is found there, and said.
    """
    said: list[str] = []
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read by torch.load(weights_only=True), the only way Sheer reads a pickle: {reason}"
        ) from error
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
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    owners: dict[tuple[object, ...], str] = {}
    for name, tensor in found.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        owner = owners.setdefault(place, names[name]) if tensor.numel() else names[name]
        if owner == names[name]:
            tensors[owner] = tensor
        else:
            ties[names[name]] = owner
    return Foreign(tensors, ties, said)
