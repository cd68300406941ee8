"""Folders of nodes: what a rank needs of a checkpoint and has not in its own is brought from a rank that has it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sheer.checkpoint.folder import TEMP, explained, versions
from sheer.checkpoint.index import INDEX, Index, parse_index, read_index_bytes
from sheer.checkpoint.ranks import Axis, together
from sheer.checkpoint.reader import Request
from sheer.checkpoint.tensorfile import CHUNK
from sheer.errors import CheckpointError


def open_here(root: Path, raw: bytes, *, tag: str, alone: bool) -> Index:
    """This rank's part of the checkpoint `tag` whose index is `raw`; none of it where its folder has no such tag.

    `alone`: `root` is the checkpoint's own folder. A save that was killed while folders were committed may have left
    this one aside, complete: it is where its index says.
    """
    places = [root] if alone else versions(root, tag)
    same = (place for place in places if (place / INDEX).is_file() and read_index_bytes(place) == raw)
    directory = next(same, places[0])
    if (directory / INDEX).is_file() and read_index_bytes(directory) != raw:
        raise CheckpointError(
            f"{directory} is another checkpoint than rank 0's of the same name. Load a tag that was saved by all nodes "
            "together, or remove it here."
        )
    return parse_index(raw, directory=directory, tag=tag, local=True)


@contextmanager
def at_hand(index: Any, requests: Sequence[Request], *, axis: Axis) -> Iterator[Any]:
    """`index` with all files that `requests` need, for as long as this lasts. Collective on `axis`.

    Files are copied whole, to this rank's folder. Raises CheckpointError on every rank where no rank has one.
    """
    doing = f"bringing files of checkpoint {index.directory} together"
    needs: list[frozenset[str]] = axis.gather_objects(_needed(index, requests) & index.lacking)
    lacks: list[frozenset[str]] = axis.gather_objects(index.lacking)
    root = together(axis, doing, lambda: _scratch_root(index.directory))
    with tempfile.TemporaryDirectory(prefix=f"{TEMP}fetched-", dir=root) as scratch:
        for file in sorted(frozenset[str]().union(*needs)):
            holders = [rank for rank, lacking in enumerate(lacks) if file not in lacking]
            if not holders:
                raise index.damaged(file, "the file is in no node's folder")
            into = Path(scratch) / file if file in needs[axis.rank] else None
            _bring(index, file, holder=holders[0], into=into, axis=axis, doing=doing)
        yield replace(index, fetched=Path(scratch))


def _scratch_root(directory: Path) -> Path:
    root = directory.parent
    with explained(f"cannot make {root}"):
        root.mkdir(parents=True, exist_ok=True)
    return root


def _needed(index: Index, requests: Iterable[Request]) -> frozenset[str]:
    """The files that hold elements of `requests`."""
    files = set()
    for request in requests:
        entry, stop = index.entry(request.key), request.start + request.out.numel()
        assert entry is not None, "requests are planned from the index"
        files |= {p.file for p in entry.pieces if p.inline is None and p.start < stop and request.start < p.stop}
    return frozenset(files)


def _bring(index: Index, file: str, *, holder: int, into: Path | None, axis: Axis, doing: str) -> None:
    """From rank `holder` to `into`, where a rank names one, a chunk at a time. Collective."""
    for at in range(0, index.content.files[file].size, CHUNK):
        part = together(axis, doing, lambda: _part(index.directory / file, at) if axis.rank == holder else b"")  # noqa: B023
        told: bytes = axis.gather_objects(part)[holder]
        together(axis, doing, lambda: None if into is None else _append(into, told))  # noqa: B023


def _part(path: Path, at: int) -> bytes:
    with explained(f"cannot read {path}"), path.open("rb") as file:
        file.seek(at)
        return file.read(CHUNK)


def _append(path: Path, part: bytes) -> None:
    with explained(f"cannot write {path}"), path.open("ab") as file:
        file.write(part)
