"""`torch.distributed.checkpoint` (DCP): a folder with `.metadata`. Read without a process group, and without its code.

stored.py    the files                       meaning.py   which of it is the model, which the optimizer
writing.py   by the library itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sheer.checkpoint.formats.dcp.meaning import Moment, Place, find_model, find_optimizer, groups_of, moments
from sheer.checkpoint.formats.dcp.stored import METADATA, Stored
from sheer.checkpoint.formats.dcp.writing import write
from sheer.checkpoint.formats.foreign import Foreign, as_json, hyperparameters
from sheer.checkpoint.formats.weights import without_wrappers
from sheer.checkpoint.shard import Shard
from sheer.errors import CheckpointError

__all__ = ["find", "read", "write"]

_NO_NAMES = (
    "its parameters are numbered, and which number is which name is known only from the optimizer groups of a run "
    "(torch.distributed.checkpoint.state_dict.get_state_dict would name them)"
)


def find(place: Path, tag: str | None) -> Path | None:
    """A folder with `.metadata`."""
    folder = place if tag is None else place / tag
    return folder if (folder / METADATA).is_file() else None


def read(folder: Path, groups: Sequence[Sequence[str]] | None) -> Foreign:
    """What the checkpoint in `folder` holds. `groups` names what an `Optimizer.state_dict` numbers."""
    stored = Stored(folder)
    optimizer = find_optimizer([*stored.tensors, *stored.objects])
    kept = [] if optimizer is None else moments(list(stored.tensors), optimizer)
    rest = [place for place in stored.tensors if optimizer is None or place[: len(optimizer)] != optimizer]
    model = find_model(rest)
    said = [f"{folder} is a checkpoint of torch.distributed.checkpoint"]
    left = [".".join(map(str, place)) for place in rest if place[:-1] != model]
    if left:
        said.append(f"left out, since only the model and the optimizer are read: {', '.join(left)}")
    keys = {str(place[-1]): stored.tensors[place] for place in rest if place[:-1] == model}
    names = without_wrappers(keys, said)
    shards = [shard for name, key in keys.items() for shard in stored.shards(key, "param", names[name])]
    objects = _objects(stored, optimizer, said)
    state: dict[str, Any] = {"client_state": _client_state(objects, optimizer, said)}
    facts: dict[str, Any] = {}
    if optimizer is not None:
        settings = groups_of(objects, optimizer)
        _add_optimizer(stored, kept, _Names(settings, names, groups), shards, facts)
        state["groups"] = [as_json(group, said, what="optimizer's groups") for group in hyperparameters(settings)]
    return Foreign(shards, {}, said, facts, state)


def _objects(stored: Stored, optimizer: Place | None, said: list[str]) -> dict[Place, Any]:
    """What is no tensor, by its path; of what is not the optimizer's, what is not plain data is said to be left."""
    objects = {}
    for place, key in stored.objects.items():
        try:
            objects[place] = stored.object(key)
        except CheckpointError:
            if optimizer is not None and place[: len(optimizer)] == optimizer:
                raise
            said.append(f"left out, since it is not plain data: {key}")
    return objects


class _Names:
    """The parameter that an optimizer calls by name or by number."""

    def __init__(
        self,
        settings: Sequence[Mapping[str, Any]],
        own: Mapping[str, str],
        groups: Sequence[Sequence[str]] | None,
    ) -> None:
        self._own = own
        self._numbered: dict[str, str] = {}
        given = groups if groups is not None else [group.get("param_names", ()) for group in settings]
        if [len(group) for group in given] == [len(group.get("params", ())) for group in settings]:
            for group, names in zip(settings, given, strict=True):
                self._numbered.update(zip(map(str, group["params"]), names, strict=True))

    def name(self, param: str) -> str | None:
        """The parameter's own name; None where that cannot be told."""
        return self._own.get(param, self._numbered.get(param))


def _add_optimizer(
    stored: Stored, kept: Sequence[Moment], names: _Names, shards: list[Shard], facts: dict[str, Any]
) -> None:
    """Add the optimizer's states to `shards` and say in `facts` what they are."""
    shapes = {shard.name: tuple(shard.shape) for shard in shards}
    forms: dict[str, str] = {}
    facts["optimizer"] = {"forms": forms}
    if any(names.name(moment.param) is None for moment in kept):
        facts["optimizer"]["unreadable"] = _NO_NAMES
        return
    for moment in kept:
        key, name = stored.tensors[moment.place], str(names.name(moment.param))
        shape = stored.shape(key)
        form = "scalar" if not shape else "element" if shape == shapes.get(name) else "whole"
        if forms.get(moment.key) != "element":
            forms[moment.key] = form
        shards += stored.shards(key, f"optim.{moment.key}", name)


def _client_state(objects: Mapping[Place, Any], optimizer: Place | None, said: list[str]) -> dict[str, Any]:
    """What is neither tensors nor the optimizer's, by its path with dots."""
    own = {
        ".".join(map(str, place)): value
        for place, value in objects.items()
        if optimizer is None or place[: len(optimizer)] != optimizer
    }
    return as_json(own, said, what="client state")
