"""DeepSpeed's universal checkpoint: a folder per name, in it a file per state, in each the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sheer.checkpoint.formats.deepspeed.files import read_file
from sheer.checkpoint.formats.deepspeed.flat import Trained
from sheer.checkpoint.formats.foreign import whole
from sheer.checkpoint.formats.pickles import read_pickle
from sheer.errors import CheckpointError

_MASTER, _COMMON = "fp32", "optimizer_state.pt"


def read_universal(folder: Path, shapes: Mapping[str, Any], out: Trained) -> dict[str, torch.Tensor]:
    """Read `folder`; the tensors that no optimizer state belongs to are returned, by name."""
    rest: dict[str, torch.Tensor] = {}
    common = read_file(folder / _COMMON)
    out.settings, out.scaler = common.get("param_groups", []), common.get("loss_scaler")
    steps = {
        key: value
        for state in common.get("optimizer_state_dict", {}).get("state", {}).values()
        for key, value in state.items()
        if not isinstance(value, torch.Tensor) or value.dim() == 0
    }
    for place in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        name = place.name
        values = {path.stem: _tensor(path) for path in sorted(place.glob("*.pt"))}
        if _MASTER not in values:
            raise CheckpointError(f"{place} has no {_MASTER}.pt, so {name!r} has no value.")
        master = _shaped(values.pop(_MASTER), name, shapes)
        if not values:
            rest[name] = master
            continue
        out.names.add(name)
        out.shards.append(whole("param", name, master))
        for key, value in {**steps, **values}.items():
            shaped = value.reshape(master.shape) if value.numel() == master.numel() and value.dim() else value
            out.add_state(key, name, shaped, tuple(master.shape))
    return rest


def _tensor(path: Path) -> Any:
    """A file holds a tensor, or a mapping that says besides how parts of several ranks were joined."""
    content = read_pickle(path)
    tensor = content.get("param") if isinstance(content, dict) else content
    if not isinstance(tensor, torch.Tensor | int | float):
        raise CheckpointError(f"{path} holds a {type(tensor).__name__}, not a tensor.")
    return torch.as_tensor(tensor)


def _shaped(value: torch.Tensor, name: str, shapes: Mapping[str, Any]) -> torch.Tensor:
    """Of stage 3 they are flat."""
    if name in shapes and tuple(value.shape) != tuple(shapes[name]):
        if value.numel() != torch.Size(shapes[name]).numel():
            raise CheckpointError(
                f"{name!r} has {value.numel()} elements in its file; its shape is {list(shapes[name])}."
            )
        return value.reshape(tuple(shapes[name]))
    return value
