"""What a reader of another project's files brings: shards mapped from the files, and what a checkpoint says besides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from sheer.checkpoint import plain
from sheer.checkpoint.shard import Shard
from sheer.errors import CheckpointError


class Foreign(NamedTuple):
    """What another project's files hold of a model, and of its training where they hold that."""

    shards: Sequence[Shard]
    """Every tensor once, in one piece or several; where the format allows, mapped from the file and not read yet."""
    ties: dict[str, str]
    """Alias -> the name among `shards`."""
    said: list[str]
    """What a person should know of how it was read."""
    facts: Mapping[str, Any] = {}
    """What `save` takes as `facts`, but for the ties."""
    state: Mapping[str, Any] = {}
    """Of what `save` takes as `state`, what the files hold."""

    @property
    def full_state(self) -> dict[str, Any]:
        """As an engine's own checkpoint would say it."""
        return {"counters": {}, "extra_state": {}, "client_state": {}, **self.state}


class Format(Protocol):
    """One foreign format that can be read; a module with these two functions is one."""

    def find(self, place: Path, tag: str | None) -> Path | None:
        """Where the thing to read is, if `place` (and `tag` in it) is of this format; else None. Reads little."""

    def read(self, path: Path, groups: Sequence[Sequence[str]] | None) -> Foreign:
        """What is at `path`, which `find` gave. Needs no other rank.

        `groups`: the names of the parameters in each optimizer group, for formats that number them. Raises
        CheckpointError, naming file and tensor, for what is damaged, missing or of no meaning here.
        """


def whole(kind: str, name: str, tensor: torch.Tensor) -> Shard:
    """A tensor in one piece."""
    return Shard(kind, name, tuple(tensor.shape), 0, tensor.detach().contiguous().reshape(-1))


def optimizer_state(key: str, name: str, value: Any, shape: tuple[int, ...]) -> tuple[str, Shard] | None:
    """One state of the parameter `name`, and its form (see `optim.flat.StateForm`); None for a state of None.

    A step counter that is a Python number becomes the tensor that torch's optimizers keep.
    """
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = torch.tensor(float(value)) if key == "step" else torch.tensor(value, dtype=_number(value))
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"the optimizer state {key!r} of {name!r} is a {type(value).__name__}; tensors and numbers have a meaning "
            "here. Load without optimizer states."
        )
    element = tuple(value.shape) == shape and value.dim() > 0
    form = "element" if element else "whole" if value.dim() else "scalar"
    return form, whole(f"optim.{key}", name, value)


def _number(value: float) -> torch.dtype:
    return torch.int64 if isinstance(value, int) else torch.float64


def as_json(values: Mapping[str, Any], said: list[str], *, what: str) -> dict[str, Any]:
    """Of `values` those that our checkpoints can hold; the others are said to be left."""
    kept, left = {}, []
    for key, value in values.items():
        try:
            plain.encode(value, path=what)
        except CheckpointError:
            left.append(str(key))
        else:
            kept[key] = value
    if left:
        said.append(f"left out of the {what}, since JSON cannot hold it: {', '.join(left)}")
    return kept


def hyperparameters(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Optimizer groups without their parameters; tensors of one element as numbers."""
    return [
        {
            key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key not in ("params", "param_names", "step")
        }
        for group in groups
    ]


def tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Alias -> the first name of the same memory."""
    ties: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        owner = first.setdefault(place, name)
        if owner != name:
            ties[name] = owner
    return ties
