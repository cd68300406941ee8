"""The folder that Hugging Face's `from_pretrained` reads weights from: `model.safetensors`, or several such files and
`model.safetensors.index.json`. A tied tensor is there once, as `save_pretrained` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from sheer.checkpoint import plain
from sheer.checkpoint.formats.foreign import Foreign, whole
from sheer.checkpoint.formats.safetensors_file import read_file, write_file
from sheer.checkpoint.formats.weights import Weights, aside, without_wrappers
from sheer.checkpoint.tensorfile import write_bytes
from sheer.errors import CheckpointError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def write(weights: Weights, target: Path, *, most_bytes: int) -> list[Path]:
    """Make the folder `target` with files of at most `most_bytes` of tensors each (one tensor may be larger); the
    files made."""
    groups = _groups(weights, most_bytes)
    count = len(groups)
    names = [_SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in _from_1(count)]
    with aside(target) as place:
        place.mkdir()
        for file, group in zip(names, groups, strict=True):
            write_file(weights, place / file, names=group, metadata={"format": "pt"})
        if count > 1:
            total = sum(weight.nbytes for weight in weights.listed.values())
            where = {name: file for file, group in zip(names, groups, strict=True) for name in group}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            names.append(_INDEX)
            write_bytes(place / names[-1], json.dumps(index, indent=2).encode() + b"\n")
    return [target / name for name in names]


def _from_1(count: int) -> range:
    return range(1, count + 1)


def _groups(weights: Weights, most_bytes: int) -> list[list[str]]:
    """The names file by file, in order; at least one file."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, weight in weights.listed.items():
        if groups[-1] and held + weight.nbytes > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += weight.nbytes
    return groups


def find(place: Path, tag: str | None) -> Path | None:
    """A folder with one of the two files."""
    folder = place if tag is None else place / tag
    return folder if any((folder / name).is_file() for name in (_SINGLE, _INDEX)) else None


def read(folder: Path, groups: Sequence[Sequence[str]] | None = None) -> Foreign:
    """The tensors of a folder as `save_pretrained` writes it, mapped from its files."""
    said: list[str] = []
    where = _weight_map(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(where.values())):
        tensors.update(read_file(folder / file)[0])
    gone = sorted(where.keys() - tensors.keys())
    if gone:
        raise CheckpointError(f"{folder}: {_INDEX} lists {gone[0]!r}, which {where[gone[0]]} does not hold.")
    names = without_wrappers(tensors, said)
    return Foreign([whole("param", names[name], tensor) for name, tensor in tensors.items()], {}, said)


def _weight_map(folder: Path) -> dict[str, str]:
    """Name -> file; for a single file, only that file under no name of its own."""
    path = folder / _INDEX
    if not path.is_file():
        if not (folder / _SINGLE).is_file():
            raise CheckpointError(f"{folder} holds neither {_SINGLE} nor {_INDEX}.")
        return dict.fromkeys(read_file(folder / _SINGLE)[0], _SINGLE)
    found = plain.parse(path.read_bytes(), what=str(path))
    where = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(where, dict) or not all(isinstance(f, str) and f == Path(f).name for f in where.values()):
        raise CheckpointError(f"{path} has no `weight_map` of names to files beside it.")
    return where
