"""Saving: every rank writes its pieces aside, rank 0 writes the index, checks the whole, and makes it visible.

The phases, each ended by an agreement of all ranks: check what to save; prepare the directory (rank 0); write the
tensors; complete, check and commit (rank 0). Until the commit nothing that a reader looks at has changed. The first two
are `begin`, the others `finish`: between them the tensors may be copied, to be written beside training.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from sheer.checkpoint import checksum, plain
from sheer.checkpoint.folder import Staging, check_space, check_tag, explained, tag_of
from sheer.checkpoint.index import BLOCK, INDEX, RNG, STATE, parse_index, read_index_bytes, render_index, ties_fault
from sheer.checkpoint.ranks import Axis, on_first, together
from sheer.checkpoint.shard import Interval, Key, Shard, check_shards, tiling_fault
from sheer.checkpoint.tensorfile import Tensors, Written, small_entry, stored_nbytes, write_bytes, write_shards
from sheer.errors import CheckpointError

_SPARE = 1 << 20  # room for directory entries and for what the file system itself takes


class _Held(NamedTuple):
    """One shard as other ranks see it."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


class _Offer(NamedTuple):
    """What one rank brings to a save, checked on that rank, without its tensors."""

    tag: str
    held: list[_Held]
    nbytes: int
    rng: bytes
    """The generator states as a safetensors file."""


class _Documents(NamedTuple):
    """What rank 0 writes besides tensors, as JSON data."""

    facts: dict[str, Any]
    state: bytes


class _Aside(NamedTuple):
    """The directory that a rank writes to."""

    path: Path
    checksum: str
    """The name of the checksum that all ranks take."""


def save(
    root: str | os.PathLike[str],
    tag: str,
    *,
    shards: Sequence[Shard],
    facts: Mapping[str, Any],
    state: Mapping[str, Any],
    rng: Mapping[str, torch.Tensor],
    axis: Axis,
    save_latest: bool = True,
    keep_last: int | None = None,
    local: bool = False,
    timeout: float = 120.0,
) -> Path:
    """Save one checkpoint as `root/tag` and return that path. Collective on `axis`.

    Each element of each tensor is to be in the `shards` of exactly one rank. `facts` (what the tensors are: `ties` as
    alias -> stored name, groups, frozen names, settings) and `state` (counters, schedules, client state) are taken
    from rank 0 and come back equal; `rng` holds this rank's generator states. An existing checkpoint of that tag is
    replaced and stays loadable until the new one is complete. `keep_last` removes all but that many of the newest
    checkpoints once the new one is committed. A rank that does not come within `timeout` seconds is named.

    `root` is one folder that all ranks see; with `local` it is each rank's own, or its node's: it gets what the ranks
    that see it hold, and all else but the tensors of others.

    Raises CheckpointError on every rank, with what was there before unchanged, when a tag, shard or value cannot be
    saved, the ranks disagree, another save to `root` is in progress, or the disk refuses.
    """
    begun = begin(
        root,
        tag,
        shards=shards,
        facts=facts,
        state=state,
        rng=rng,
        axis=axis,
        save_latest=save_latest,
        keep_last=keep_last,
        local=local,
        timeout=timeout,
    )
    return finish(begun, shards, axis=axis)


class Begun(NamedTuple):
    """A save whose content is checked and whose directory is made. Nothing is written; it has to be ended."""

    doing: str
    aside: _Aside
    documents: _Documents
    offers: list[_Offer]
    staging: list[Staging]
    """On rank 0, and where folders are local on one rank for each, the one."""
    local: bool
    save_latest: bool
    keep_last: int | None

    def close(self) -> None:
        """Remove what is not complete, and let others save there."""
        while self.staging:
            self.staging.pop().close()


def begin(
    root: str | os.PathLike[str],
    tag: str,
    *,
    shards: Sequence[Shard],
    facts: Mapping[str, Any],
    state: Mapping[str, Any],
    rng: Mapping[str, torch.Tensor],
    axis: Axis,
    save_latest: bool = True,
    keep_last: int | None = None,
    local: bool = False,
    timeout: float = 120.0,
) -> Begun:
    """The first half of `save`; `finish` or `close` it. Collective on `axis`."""
    axis.assemble(f"save_checkpoint(tag={tag!r})", timeout=timeout)
    doing = f"saving checkpoint {tag!r} to {root}"
    documents = together(axis, doing, lambda: _documents(facts, state, keep_last))
    offer = together(axis, doing, lambda: _offer(tag, shards, rng))
    offers: list[_Offer] = axis.gather_objects(offer)
    staging: list[Staging] = []
    try:
        aside = on_first(axis, doing, lambda: _prepare(Path(root), offers, documents, staging, local=local))
        if local:
            aside = _own_place(Path(root), aside, offers, staging, axis=axis, doing=doing)
    except BaseException:
        for opened in staging:
            opened.close()
        raise
    return Begun(doing, aside, documents, offers, staging, local, save_latest, keep_last)


def finish(begun: Begun, shards: Sequence[Shard], *, axis: Axis) -> Path:
    """Write and commit what was begun; the checkpoint's path. Collective on `axis`, which may be another one of the
    same ranks; `shards` may be copies of those that it was begun with."""
    try:
        written = together(axis, begun.doing, lambda: _write(begun.aside, axis.rank, shards))
        parts: list[Written] = axis.gather_objects(written)
        commit = _commit_everywhere if begun.local else _commit_once
        return commit(begun, parts, axis)
    finally:
        begun.close()


def _commit_once(begun: Begun, parts: Sequence[Written], axis: Axis) -> Path:
    """In the one folder, by rank 0."""

    def commit() -> Path:
        staging = begun.staging[0]
        _complete(staging.path, _closing_files(begun, parts), local=False)
        final = staging.place()
        if begun.save_latest:
            staging.point()
        staging.tidy(begun.keep_last)
        return final

    return on_first(axis, begun.doing, commit)


def _commit_everywhere(begun: Begun, parts: Sequence[Written], axis: Axis) -> Path:
    """In each node's folder, a phase at a time on all. Rank 0's `latest` moves last: what it names is whole."""

    def each(work: Callable[[Staging], object], *, here: bool = True) -> None:
        together(axis, begun.doing, lambda: [work(staging) for staging in begun.staging if here])

    closing = on_first(axis, begun.doing, lambda: _closing_files(begun, parts))
    each(lambda staging: _complete(staging.path, closing, local=True))
    try:
        each(Staging.place)
    except BaseException:
        for staging in begun.staging:
            staging.take_back()
        raise
    if begun.save_latest:
        each(Staging.point, here=axis.rank > 0)
        each(Staging.point, here=axis.rank == 0)
    each(lambda staging: staging.tidy(begun.keep_last))
    return begun.aside.path.parent / begun.offers[0].tag


def _documents(facts: Mapping[str, Any], state: Mapping[str, Any], keep_last: int | None) -> _Documents:
    if keep_last is not None and (not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last < 1):
        raise CheckpointError(f"keep_last is {keep_last!r}; it is None or a whole number of checkpoints, at least 1.")
    encoded = plain.render(plain.encode(dict(state), path="state"))
    return _Documents(dict(plain.encode({**facts}, path="facts")), encoded.encode())


def _offer(tag: str, shards: Sequence[Shard], rng: Mapping[str, torch.Tensor]) -> _Offer:
    check_shards(shards)
    held = [_Held(s.key, s.shape, s.data.dtype, s.start, s.stop) for s in shards]
    states = safetensors.torch.save({name: state.contiguous() for name, state in rng.items()})
    return _Offer(check_tag(tag), held, stored_nbytes(shards), states)


def _prepare(
    root: Path, offers: Sequence[_Offer], documents: _Documents, staging: list[Staging], *, local: bool
) -> _Aside:
    """Rank 0: check that the ranks' offers make one whole checkpoint, and make the directory to write it to."""
    tags = {offer.tag: rank for rank, offer in reversed(list(enumerate(offers)))}
    if len(tags) > 1:
        said = ", ".join(f"rank {rank} {tag!r}" for tag, rank in tags.items())
        raise CheckpointError(f"the ranks disagree on the tag: {said}. Pass the same tag on every rank.")
    stored = _check_whole(offers)
    ties = plain.decode(documents.facts).get("ties", {})
    fault = ties_fault(ties, {key.name for key in stored if key.kind in ("param", "buffer")})
    if fault:
        raise CheckpointError(f"{fault}.")
    nbytes = 0 if local else _nbytes(offers)  # whose folders are one is not known yet
    staging.append(Staging(root, offers[0].tag, nbytes=nbytes + len(documents.state) + _SPARE))
    return _Aside(staging[0].path, checksum.preferred())


def _nbytes(offers: Iterable[_Offer]) -> int:
    return sum(offer.nbytes + 400 * len(offer.held) + len(offer.rng) for offer in offers)


def _own_place(
    root: Path, first: _Aside, offers: Sequence[_Offer], staging: list[Staging], *, axis: Axis, doing: str
) -> _Aside:
    """The directory in this rank's folder, made by one of the ranks that see that folder. Collective."""
    place = root / first.path.name
    seen: list[bool] = axis.gather_objects(place.is_dir())  # of rank 0's making, before others make theirs
    refusal = together(axis, doing, lambda: None if seen[axis.rank] else _claim(root, place, offers, staging))

    def find() -> tuple[str, int, int]:
        if refusal is not None and not place.is_dir():
            raise refusal
        there = place.stat()
        return socket.gethostname(), there.st_dev, there.st_ino

    mine = together(axis, doing, find)
    folders: list[tuple[str, int, int]] = axis.gather_objects(mine)
    sharing = [offer for offer, folder in zip(offers, folders, strict=True) if folder == mine]
    together(axis, doing, lambda: check_space(root, _nbytes(sharing) + _SPARE))
    return first._replace(path=place)


def _claim(root: Path, place: Path, offers: Sequence[_Offer], staging: list[Staging]) -> CheckpointError | None:
    """Make `place`; why not, which is no fault where another rank was faster."""
    try:
        staging.append(Staging(root, offers[0].tag, nbytes=_SPARE, name=place.name))
    except CheckpointError as error:
        return error
    return None


def _check_whole(offers: Sequence[_Offer]) -> set[Key]:
    """The keys that are saved. Every tensor has one shape and dtype, and each of its elements one holder."""
    first: dict[Key, tuple[_Held, int]] = {}
    intervals: dict[Key, list[Interval]] = {}
    for rank, offer in enumerate(offers):
        for held in offer.held:
            known, other = first.setdefault(held.key, (held, rank))
            if (held.shape, held.dtype) != (known.shape, known.dtype):
                raise CheckpointError(
                    f"{held.key} is {list(held.shape)} {held.dtype} on rank {rank} and {list(known.shape)} "
                    f"{known.dtype} on rank {other}; a tensor has one shape and dtype."
                )
            intervals.setdefault(held.key, []).append(Interval(held.start, held.stop, f"rank {rank}"))
    for key, (held, _) in first.items():
        fault = tiling_fault(torch.Size(held.shape).numel(), intervals[key])
        if fault:
            raise CheckpointError(f"{key} {list(held.shape)}: {fault}; each is to be passed by exactly one rank.")
    return set(first)


def _write(aside: _Aside, rank: int, shards: Sequence[Shard]) -> Written:
    path = aside.path
    if not path.is_dir():
        raise CheckpointError(
            f"{path}, which rank 0 made, cannot be seen from rank {rank}. All ranks save to one shared directory, or "
            "set checkpoint.use_node_local_storage."
        )
    with explained(f"cannot write to {path}"):
        return write_shards(path / f"rank{rank:05d}.safetensors", shards, checksum=checksum.named(aside.checksum))


def _closing_files(begun: Begun, parts: Sequence[Written]) -> dict[str, bytes]:
    """What is in every folder and no rank's own, the index last."""
    closing = {STATE: begun.documents.state, RNG: _merge_rng([offer.rng for offer in begun.offers])}
    files = {name: entry for part in parts for name, entry in part.files.items()}
    content = {
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world": len(parts),
        "block": BLOCK,
        "checksum": begun.aside.checksum,
        "files": files | {name: small_entry(data) for name, data in closing.items()},
        "facts": begun.documents.facts,
        "tensors": _merge_tensors([part.tensors for part in parts]),
    }
    return {**closing, INDEX: render_index(content)}


def _complete(path: Path, closing: Mapping[str, bytes], *, local: bool) -> None:
    """Write what is no rank's own, then open the result as a reader would."""
    with explained(f"cannot write to {path}"):
        for name, data in closing.items():
            write_bytes(path / name, data)
        parse_index(read_index_bytes(path), directory=path, tag=tag_of(path), local=local)


def _merge_tensors(parts: Sequence[Tensors]) -> Tensors:
    """The tensors of all ranks, each with its pieces in order."""
    merged: Tensors = {}
    for part in parts:
        for kind, named in part.items():
            for name, entry in named.items():
                whole = merged.setdefault(kind, {}).setdefault(name, {**entry, "pieces": []})
                whole["pieces"] = sorted([*whole["pieces"], *entry["pieces"]], key=lambda piece: piece["start"])
    return merged


def _merge_rng(states: Sequence[bytes]) -> bytes:
    return safetensors.torch.save(
        {
            f"{rank:05d}.{name}": state
            for rank, encoded in enumerate(states)
            for name, state in safetensors.torch.load(encoded).items()
        }
    )
