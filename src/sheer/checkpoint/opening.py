"""Opening whatever checkpoint is there, ours or another project's, for all ranks alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sheer.checkpoint.folder import check_tag, find
from sheer.checkpoint.loading import as_it_is, open_together, read_rng, read_state
from sheer.checkpoint.local import at_hand
from sheer.checkpoint.mapped import Mapped, MappedReader, Reading, Source
from sheer.checkpoint.ranks import Axis, on_first, together
from sheer.checkpoint.reader import Reader
from sheer.errors import CheckpointError

if TYPE_CHECKING:
    from sheer.checkpoint.formats import Found


@dataclass(frozen=True)
class Opened:
    """A checkpoint as far as it is read before anything changes."""

    index: Source
    state: dict[str, Any]
    """What `save` was given as `state`."""
    rng: dict[str, torch.Tensor] | None
    """This rank's generator states; None where the run that saved had no such rank."""
    reader: Callable[[Any], Reading]
    """What reads `index`."""
    fetch: Callable[..., AbstractContextManager[Any]]
    """What brings it together before."""
    said: tuple[str, ...]
    """What a person should know of how it was read."""


def open_any(
    root: str | os.PathLike[str],
    tag: str | None,
    *,
    axis: Axis,
    groups: Callable[[], Sequence[Sequence[str]] | None],
    local: bool,
    timeout: float,
    alike: Mapping[str, object],
) -> Opened | None:
    """Open the checkpoint `tag` in `root` (the latest, or `root` itself); None where `tag` is None and there is none.

    Collective on `axis`: rank 0 decides which it is. `groups` gives the names of the parameters in each optimizer
    group, for formats that number them; it is called on all ranks where another project wrote the checkpoint. With
    `local`, `root` is each rank's own folder or its node's. `alike` are other arguments that
    all ranks must have given.
    Raises CheckpointError on every rank where it cannot be read.
    """
    from sheer.checkpoint.formats import find_foreign  # a run that loads nothing needs none of them

    axis.assemble("load_checkpoint", timeout=timeout)
    _check_alike({"tag": tag, **alike}, axis)
    if tag is not None:
        check_tag(tag)
    foreign = on_first(axis, "load_checkpoint", lambda: find_foreign(Path(root), tag))
    if foreign is not None:
        named = groups()
        return together(axis, f"loading checkpoint {foreign.path}", lambda: _open_foreign(foreign, named))
    if tag is None and not on_first(axis, "load_checkpoint", lambda: find(root) is not None):
        return None
    index = open_together(root, tag, axis=axis, local=local, timeout=timeout)
    doing = f"loading checkpoint {index.directory}"
    if local:  # rank 0's folder has all but the tensors of others
        state = on_first(axis, doing, lambda: read_state(index))
        rngs = on_first(axis, doing, lambda: [read_rng(index, rank) for rank in range(axis.size)])
        return Opened(index, state, rngs[axis.rank], Reader, at_hand, ())

    def read() -> Opened:
        return Opened(index, read_state(index), read_rng(index, axis.rank), Reader, as_it_is, ())

    return together(axis, doing, read)


def _check_alike(mine: Mapping[str, object], axis: Axis) -> None:
    """What comes next hangs on these arguments; ranks that differ would wait for each other in vain."""
    told: list[Mapping[str, object]] = axis.gather_objects(mine)
    for name, first in told[0].items():
        rank = next((rank for rank, theirs in enumerate(told) if theirs[name] != first), None)
        if rank is not None:
            raise CheckpointError(
                f"load_checkpoint: {name}={told[rank][name]!r} on rank {rank}, and {first!r} on rank 0. Pass the same "
                "on every rank."
            )


def _open_foreign(found: Found, groups: Sequence[Sequence[str]] | None) -> Opened:
    foreign = found.read(groups)
    facts = {**foreign.facts, "ties": foreign.ties}
    source = Mapped.of(found.path, shards=foreign.shards, facts=facts)
    return Opened(source, foreign.full_state, None, MappedReader, as_it_is, tuple(foreign.said))
