"""The folder that Hugging Face's `from_pretrained` reads weights from: `model.safetensors`, or several such files and
`model.safetensors.index.json`. A tied tensor is there once, as `save_pretrained` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path

from sheer.checkpoint.formats.safetensors_file import write_file
from sheer.checkpoint.formats.weights import Weights, aside
from sheer.checkpoint.tensorfile import write_bytes


def write(weights: Weights, target: Path, *, most_bytes: int) -> list[Path]:
    """Make the folder `target` with files of at most `most_bytes` of tensors each (one tensor may be larger); the
    files made."""
    groups = _groups(weights, most_bytes)
    count = len(groups)
    names = (
        ["model.safetensors"] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in _from_1(count)]
    )
    with aside(target) as place:
        place.mkdir()
        for file, group in zip(names, groups, strict=True):
            write_file(weights, place / file, names=group, metadata={"format": "pt"})
        if count > 1:
            total = sum(weight.nbytes for weight in weights.listed.values())
            where = {name: file for file, group in zip(names, groups, strict=True) for name in group}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            names.append("model.safetensors.index.json")
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
