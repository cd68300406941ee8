"""A checkpoint that other software wrote, as this room reads its own: named tensors in pieces, mapped from its files.

`Source` and `Reading` are all that loading asks of a checkpoint, whoever wrote it. `Index` and `Reader` are those of
ours; `Mapped` and `MappedReader` those of tensors that are in memory, which mostly is the page cache's.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from sheer.checkpoint.reader import Request
from sheer.checkpoint.shard import Interval, Key, Shard, check_shards, tiling_fault
from sheer.errors import CheckpointError


class Described(Protocol):
    """What is known of a stored tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The stored dtype."""


class Source(Protocol):
    """A checkpoint that was opened: what it holds. Plain data."""

    @property
    def directory(self) -> Path:
        """Where it is."""

    @property
    def tag(self) -> str:
        """What it is called there."""

    @property
    def crc32(self) -> int:
        """Ranks with equal ones look at the same checkpoint."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the writer said about the run."""

    @property
    def ties(self) -> dict[str, str]:
        """Alias -> the name under which the tied tensor is stored."""

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of tensors it holds."""

    @property
    def world(self) -> int:
        """How many ranks wrote it."""

    def entry(self, key: Key) -> Described | None:
        """The tensor called `key`, or None."""

    def entries(self) -> Iterator[tuple[Key, Described]]:
        """All tensors."""

    def holding(self, tensors: Mapping[Key, Any], facts: Mapping[str, Any]) -> Source:
        """The same as if `tensors`, which are some of its own under whatever names, were all it has."""


class Reading(Protocol):
    """Reads the tensors of one source; a context manager."""

    def __enter__(self) -> Reading: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def fill(self, requests: Iterable[Request]) -> int:
        """Fill every request's `out`; the number of bytes read."""

    def check(self, requests: Iterable[Request]) -> int:
        """Find all that `fill` would find wrong, leaving every `out` as it is; the number of bytes read."""


class _Whole(NamedTuple):
    """One logical tensor and the pieces that make it up, in order."""

    shape: tuple[int, ...]
    torch_dtype: torch.dtype
    pieces: tuple[Shard, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Mapped:
    """A `Source` of shards in memory. Validated when made: the pieces of every tensor cover it exactly once."""

    directory: Path
    facts: Mapping[str, Any]
    _tensors: Mapping[Key, _Whole]
    world: int = 1

    @classmethod
    def of(cls, directory: Path, *, shards: Sequence[Shard], facts: Mapping[str, Any]) -> Mapped:
        """Raises CheckpointError, naming the tensor, where pieces are missing, overlap, or differ in shape or dtype."""
        return cls(directory, facts, _put_together(directory, shards))

    @property
    def tag(self) -> str:
        """What it is called where it is."""
        return self.directory.name

    @property
    def ties(self) -> dict[str, str]:
        """Alias -> the name under which the tied tensor is stored."""
        return dict(self.facts.get("ties", {}))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of tensors it holds."""
        return frozenset(key.kind for key in self._tensors)

    @cached_property
    def crc32(self) -> int:
        """Of what it holds, not of the bytes: files of other software carry no checksum that this room could use."""
        described = sorted((*key, whole.shape, str(whole.torch_dtype)) for key, whole in self._tensors.items())
        return zlib.crc32(repr((self.directory.name, described)).encode())

    def entry(self, key: Key) -> _Whole | None:
        """The tensor called `key`, or None."""
        return self._tensors.get(key)

    def entries(self) -> Iterator[tuple[Key, _Whole]]:
        """All tensors."""
        yield from self._tensors.items()

    def holding(self, tensors: Mapping[Key, _Whole], facts: Mapping[str, Any]) -> Mapped:
        """The same as if `tensors`, which are some of its own under whatever names, were all it has."""
        return replace(self, _tensors=tensors, facts=facts)


def _put_together(directory: Path, shards: Sequence[Shard]) -> dict[Key, _Whole]:
    check_shards(shards)
    held: dict[Key, list[Shard]] = {}
    for shard in shards:
        held.setdefault(shard.key, []).append(shard)
    tensors: dict[Key, _Whole] = {}
    for key, pieces in held.items():
        pieces.sort(key=lambda piece: piece.start)
        first = pieces[0]
        if any((piece.shape, piece.data.dtype) != (first.shape, first.data.dtype) for piece in pieces):
            raise CheckpointError(f"{directory}: {key} has pieces of different shape or dtype.")
        whole = _Whole(tuple(first.shape), first.data.dtype, tuple(pieces))
        fault = tiling_fault(whole.numel, (Interval(piece.start, piece.stop, "a piece") for piece in pieces))
        if fault:
            raise CheckpointError(f"{directory}: {key} {list(whole.shape)}: {fault}. A file is missing or damaged.")
        tensors[key] = whole
    return tensors


class MappedReader:
    """Reads a `Mapped`. Nothing can be found wrong with bytes that have no checksum, only with what they convert to."""

    def __init__(self, source: Mapped) -> None:
        self._source = source

    def __enter__(self) -> MappedReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing is held that the source does not hold."""

    def fill(self, requests: Iterable[Request]) -> int:
        """Fill every request's `out`; the number of bytes read."""
        nbytes = 0
        for out, data in self._parts(requests):
            out.copy_(data)
            nbytes += data.nbytes
        return nbytes

    def check(self, requests: Iterable[Request]) -> int:
        """Find integers that the wanted dtype cannot hold; the number of bytes read."""
        nbytes = 0
        for request in requests:
            for out, data in self._parts([request]):
                exact = data.dtype.is_floating_point or data.dtype.is_complex or data.dtype == out.dtype
                if not exact and not torch.equal(data.to(out.dtype).to(data.dtype), data):
                    raise CheckpointError(
                        f"{request.key} holds integers (stored as {data.dtype}) that {out.dtype} cannot hold exactly. "
                        f"Load it into a tensor of dtype {data.dtype}."
                    )
                nbytes += data.nbytes
        return nbytes

    def _parts(self, requests: Iterable[Request]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each stretch of a destination and the stored elements that go there."""
        for request in requests:
            whole = self._source.entry(request.key)
            assert whole is not None, "requests are planned from the source"
            stop = request.start + request.out.numel()
            for piece in whole.pieces:
                low, high = max(piece.start, request.start), min(piece.stop, stop)
                if low < high:
                    out = request.out[low - request.start : high - request.start]
                    yield out, piece.data[low - piece.start : high - piece.start]
