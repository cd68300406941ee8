"""The parameters and buffers of a checkpoint as other projects know them: by name, whole, in one dtype if asked for."""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sheer.checkpoint.folder import explained, sync_directory
from sheer.checkpoint.index import Index
from sheer.checkpoint.loading import read_state
from sheer.checkpoint.reader import Reader, Request, host_empty
from sheer.checkpoint.shard import Key, as_bytes
from sheer.checkpoint.tensorfile import CHUNK
from sheer.errors import CheckpointError

_OPTIM = "optim."


class Weight(NamedTuple):
    """One tensor to be written."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the whole tensor, as it is written."""
        return math.prod(self.shape) * self.dtype.itemsize


class Weights:
    """Reads a chunk at a time, every byte verified. `reader` is open, and of the checkpoint `index`."""

    def __init__(self, index: Index, reader: Reader, *, dtype: torch.dtype | None = None) -> None:
        """`dtype`: what floating-point tensors are written in; None writes them as they are stored."""
        self._reader = reader
        self.ties: Mapping[str, str] = index.ties
        """Alias -> the name under which a tied tensor is listed."""
        self.listed: dict[str, Weight] = {}
        """In the checkpoint's order, each tensor once."""
        for key, entry in index.entries():
            if key.kind in ("param", "buffer"):
                converts = dtype is not None and entry.torch_dtype.is_floating_point
                written = dtype if converts and dtype is not None else entry.torch_dtype
                self.listed[key.name] = Weight(key, entry.shape, written)

        self.moments: dict[str, dict[str, Key]] = {}
        """Parameter -> optimizer state -> its key."""
        for key, _ in index.entries():
            if key.kind.startswith(_OPTIM):
                self.moments.setdefault(key.name, {})[key.kind.removeprefix(_OPTIM)] = key
        self._index = index

    @cached_property
    def state(self) -> dict[str, Any]:
        """What `save` was given as `state`."""
        return read_state(self._index)

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: settings, and under "params" the names."""
        members: dict[str, int] = self._index.facts.get("groups", {})
        return [
            {**settings, "params": [name for name, group in members.items() if group == number]}
            for number, settings in enumerate(self.state.get("groups", ()))
        ]

    def moment(self, name: str, state: str) -> torch.Tensor:
        """One optimizer state of the parameter `name`, whole, as it is stored."""
        key = self.moments[name][state]
        entry = self._index.entry(key)
        assert entry is not None, "moments are listed from the index"
        flat = host_empty(entry.numel, entry.torch_dtype)
        self._reader.fill([Request(key, 0, flat)])
        return flat.view(entry.shape)

    def chunks(self, name: str) -> Iterator[memoryview]:
        """The tensor's bytes, a few MiB at a time."""
        weight = self.listed[name]
        step, numel = CHUNK // weight.dtype.itemsize, math.prod(weight.shape)
        for start in range(0, numel, step):
            part = host_empty(min(step, numel - start), weight.dtype)
            self._reader.fill([Request(weight.key, start, part)])
            yield as_bytes(part)

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor in memory."""
        weight = self.listed[name]
        flat = host_empty(math.prod(weight.shape), weight.dtype)
        self._reader.fill([Request(weight.key, 0, flat)])
        return flat.view(weight.shape)


@contextmanager
def aside(target: Path) -> Iterator[Path]:
    """A place beside `target` to write a file or folder to; it becomes `target`, or goes on an error."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; export to a new place, or remove it first.")
    place = target.parent / f".tmp-{target.name}-{secrets.token_hex(4)}"
    with explained(f"cannot export to {target}"):
        try:
            yield place
            os.rename(place, target)
            sync_directory(target.parent)
        except BaseException:
            if place.is_dir():
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.unlink(missing_ok=True)
            raise


_LEADING = ("module.", "wrapped.", "_fsdp_wrapped_module.")
_ANYWHERE = "_orig_mod."


def without_wrappers(names: Mapping[str, object], said: list[str]) -> dict[str, str]:
    """Name -> the user's own name: without what torch.compile put in anywhere, and wrappers before all names."""
    plain = {name: name.replace(_ANYWHERE, "") for name in names}
    removed = [_ANYWHERE] if any(_ANYWHERE in name for name in names) else []
    while leading := next((p for p in _LEADING if plain and all(n.startswith(p) for n in plain.values())), None):
        plain = {name: known.removeprefix(leading) for name, known in plain.items()}
        removed.append(leading)
    if removed:
        said.append(f"removed the prefixes that wrappers had put before names: {', '.join(removed)}")
    if len(set(plain.values())) < len(plain):
        raise CheckpointError(f"without the prefixes {', '.join(removed)} two tensors would have the same name.")
    return plain
