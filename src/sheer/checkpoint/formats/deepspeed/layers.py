"""DeepSpeed's pipelines: a file per layer, and a ZeRO optimizer per stage. Names become those of our PipelineModule.

A layer's parameter is `3.weight` here and there. What DeepSpeed calls `tied_modules.KEY.weight` is here the first layer
that has it, the others are tied to it. Which layers these are, no file says; it is found by comparing values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from sheer.checkpoint.formats.deepspeed.files import Files, field, read_file
from sheer.checkpoint.formats.deepspeed.flat import Trained, read_stage_1_and_2
from sheer.checkpoint.shard import Shard
from sheer.errors import CheckpointError

_TIED = "tied_modules."
Layers = Mapping[int, Mapping[str, torch.Tensor]]


class Renamed(NamedTuple):
    """What the stages hold, under this library's names."""

    trained: Trained
    ties: dict[str, str]
    layers: dict[str, torch.Tensor]
    """All that the layers' files hold, by its name here."""


def read_pipeline(files: Files) -> Renamed:
    """Read all stages and layers."""
    layers: Layers = {number: read_file(path) for number, path in files.layers.items()}
    out, ties = Trained(), dict[str, str]()
    firsts: dict[str, str] = {}
    named = [_names(paths) for paths in files.optim]
    unnamed = _unnamed(layers, set[str]().union(*named))
    for paths, names in zip(files.optim, named, strict=True):
        stage = Trained()
        read_stage_1_and_2(paths, _shapes(layers, unnamed, names), stage)
        tied = _Tied(unnamed, names, stage)
        own = {name: tied.own_name(name) for name in sorted(names)}
        for name in sorted(names):
            same = firsts.get(name)
            if same is not None and torch.equal(_joined(out, same), _joined(stage, name)):
                own[name] = same
            firsts.setdefault(name, own[name])
            ties.update({alias: own[name] for alias in tied.all_names(name) if alias != own[name]})
        taken = set(out.names)
        out.shards += [_renamed(s, own[s.name]) for s in stage.shards if own[s.name] not in taken]
        out.names |= set(own.values())
        out.groups.update({own[name]: group for name, group in stage.groups.items()})
        out.forms.update(stage.forms)
        out.settings, out.scaler = stage.settings, stage.scaler
    everything = {f"{number}.{local}": value for number, held in layers.items() for local, value in held.items()}
    return Renamed(out, {alias: name for alias, name in ties.items() if alias not in out.names}, everything)


def _names(paths: Sequence[Path]) -> set[str]:
    names: set[str] = set()
    for path in paths:
        content = field(read_file(path), "optimizer_state_dict", path=path)
        names.update(*field(content, "param_slice_mappings", path=path))
    return names


def _shapes(layers: Layers, unnamed: Layers, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    shapes = {f"{number}.{local}": tuple(v.shape) for number, held in layers.items() for local, v in held.items()}
    for name in (name for name in names if name.startswith(_TIED)):
        local = _local(name)
        found = {tuple(held[local].shape) for held in unnamed.values() if local in held}
        if len(found) != 1:
            raise CheckpointError(
                f"the shape of {name!r} cannot be told: {len(found)} shapes of {local!r} are in layers without a name "
                "of their own. Convert the checkpoint with DeepSpeed's ds_to_universal first."
            )
        shapes[name] = found.pop()
    return shapes


def _unnamed(layers: Layers, names: Iterable[str]) -> dict[int, Mapping[str, torch.Tensor]]:
    """Layers whose tensors the optimizer has under a key, not under the layer's number."""
    numbered = {name.split(".")[0] for name in names}
    return {number: held for number, held in layers.items() if str(number) not in numbered}


def _local(name: str) -> str:
    """`tied_modules.KEY.a.weight` -> `a.weight`; a key of ModuleDict has no dot."""
    return name.removeprefix(_TIED).partition(".")[2]


def _joined(held: Trained, name: str) -> torch.Tensor:
    """The whole parameter `name`, flat."""
    pieces = sorted((s for s in held.shards if s.kind == "param" and s.name == name), key=lambda s: s.start)
    return torch.cat([piece.data for piece in pieces])


def _renamed(shard: Shard, name: str) -> Shard:
    return Shard(shard.kind, name, shard.shape, shard.start, shard.data)


class _Tied:
    """Which layers of a stage stand behind its tied keys."""

    def __init__(self, unnamed: Layers, names: set[str], stage: Trained) -> None:
        self._layers: dict[str, list[int]] = {}
        by_key: dict[str, list[str]] = {}
        for name in sorted(names):
            if name.startswith(_TIED):
                by_key.setdefault(name.removeprefix(_TIED).partition(".")[0], []).append(name)
        for key, members in by_key.items():
            values = {_local(name): _joined(stage, name) for name in members}
            self._layers[key] = [n for n, held in sorted(unnamed.items()) if _same(held, values)]
            if not self._layers[key]:
                raise CheckpointError(f"no layer's file holds the values of {members[0]!r}; a file is damaged.")

    def all_names(self, name: str) -> list[str]:
        """All names of what DeepSpeed calls `name`."""
        if not name.startswith(_TIED):
            return [name]
        key = name.removeprefix(_TIED).partition(".")[0]
        return [f"{number}.{_local(name)}" for number in self._layers[key]]

    def own_name(self, name: str) -> str:
        """The first of them."""
        return self.all_names(name)[0]


def _same(held: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> bool:
    return all(
        local in held and torch.equal(held[local].reshape(-1), value.to(held[local].dtype))
        for local, value in values.items()
    )
