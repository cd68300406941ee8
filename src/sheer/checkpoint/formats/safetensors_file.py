"""One `.safetensors` file. A tied tensor is there once; its other names are in the file's metadata (alias -> stored
name), as `safetensors.torch.save_model` writes them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch

from sheer.checkpoint import plain
from sheer.checkpoint.formats.foreign import Foreign, whole
from sheer.checkpoint.formats.weights import Weights, aside, without_wrappers
from sheer.checkpoint.shard import SAFETENSORS_CODES
from sheer.checkpoint.tensorfile import write_fully
from sheer.errors import CheckpointError


def write(weights: Weights, target: Path) -> list[Path]:
    """Write all of `weights` to the file `target`; the files made."""
    with aside(target) as place:
        write_file(weights, place, names=list(weights.listed), metadata={"format": "pt", **weights.ties})
    return [target]


def write_file(weights: Weights, path: Path, *, names: Sequence[str], metadata: Mapping[str, str]) -> None:
    """Write the tensors called `names` to the new file `path` and flush it, a chunk at a time."""
    # Wide elements first, so that every tensor starts at a multiple of its element size.
    ordered = sorted(names, key=lambda name: -weights.listed[name].dtype.itemsize)
    with path.open("xb", buffering=0) as file:
        write_fully(file.fileno(), _header(weights, ordered, metadata))
        for name in ordered:
            for chunk in weights.chunks(name):
                write_fully(file.fileno(), chunk)
        os.fsync(file.fileno())


def _header(weights: Weights, names: Sequence[str], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        weight = weights.listed[name]
        code = SAFETENSORS_CODES[weight.dtype]
        if code == "U8" and weight.dtype is not torch.uint8:
            raise CheckpointError(f"{name!r} is {weight.dtype}, which safetensors has no word for; export to pt.")
        described[name] = {
            "dtype": code,
            "shape": list(weight.shape),
            "data_offsets": [at, at + weight.nbytes],
        }
        at += weight.nbytes
    text = plain.render(described).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text


def find(place: Path, tag: str | None) -> Path | None:
    """A file by that suffix, or that begins as the format does: the length of its header in 8 bytes, then JSON."""
    if tag is not None or not place.is_file():
        return None
    with place.open("rb") as file:
        start = file.read(9)
    alike = start[8:] == b"{" and int.from_bytes(start[:8], "little") + 8 <= place.stat().st_size
    return place if alike or place.suffix == ".safetensors" else None


def read(path: Path, groups: Sequence[Sequence[str]] | None = None) -> Foreign:
    """The tensors of the file `path`, mapped from it, and the ties that its metadata names."""
    said: list[str] = []
    tensors, metadata = read_file(path)
    names = without_wrappers(tensors, said)
    ties = {alias: names[owner] for alias, owner in metadata.items() if owner in names and alias not in tensors}
    return Foreign([whole("param", names[name], tensor) for name, tensor in tensors.items()], ties, said)


def read_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors by name, mapped from the file, and the file's metadata."""
    try:
        with safetensors.safe_open(path, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata() or {})  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}.") from error
