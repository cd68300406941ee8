"""`index.json`: what a checkpoint holds and where each byte is. Its schema, its strict reader, its writer.

The file is JSON in three parts: a first line with the format's version and the checksum of what follows, the content,
and a closing brace. Everything a reader relies on is checked here, before it allocates or reads a tensor: the
checksum, that the pieces of every tensor cover it exactly once, that the pieces of every file cover it exactly once,
and that every file is there in full.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from sheer.checkpoint import plain
from sheer.checkpoint.shard import DTYPES, Interval, Key, known_kind, tiling_fault
from sheer.errors import CheckpointError

VERSION = 2
"""Version 1 had CRC-32 only, and called a piece's checksums `crc32`."""
INDEX, STATE, RNG = "index.json", "state.json", "rng.safetensors"
BLOCK = 1 << 20
"""Bytes under one checksum: the least that a partial read must fetch to know that what it got is what was written."""
INLINE = 64
"""Tensors of at most this many bytes (step counters, scalars) stand in the index itself, as hex."""

_HEAD = re.compile(rb'\{"sheer_checkpoint":(\d{1,9}),"crc32":"([0-9a-f]{8})","content":\n')
_TAIL = b"\n}\n"
_LARGEST = 1 << 30
_MEND = "The file is damaged or was edited; load another tag, or restore it from a copy."

Count = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]
Crc32 = Annotated[StrictInt, Field(ge=0, lt=1 << 32)]
Sum = Annotated[StrictInt, Field(ge=0, lt=1 << 64)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FileEntry(_Model):
    """One file of the checkpoint besides the index."""

    size: Count
    """Bytes."""
    head: Count
    """How many leading bytes `crc32` covers: a safetensors header, or the whole of a small file."""
    crc32: Crc32


class Piece(_Model):
    """Elements `start` up to `stop` of a tensor, and where their bytes are: in a file, or here (`inline`)."""

    start: Count
    stop: Count
    file: StrictStr = ""
    at: Count = 0
    """Offset in the file."""
    sums: tuple[Sum, ...] = Field(default=(), validation_alias=AliasChoices("sums", "crc32"))
    """One checksum per block of the piece, of the checkpoint's kind."""
    inline: Annotated[StrictStr, Field(pattern=r"^([0-9a-f]{2})*$", max_length=2 * INLINE)] | None = None


class Entry(_Model):
    """One logical tensor."""

    dtype: StrictStr
    shape: Annotated[tuple[Count, ...], Field(max_length=64)]
    pieces: Annotated[tuple[Piece, ...], Field(min_length=1)]
    """In order of `start`."""

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The stored dtype."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Stored bytes of the whole tensor."""
        return self.numel * self.torch_dtype.itemsize


class Content(_Model):
    """The content of `index.json`."""

    saved_at: StrictStr
    """When, UTC, ISO 8601."""
    world: Annotated[StrictInt, Field(ge=1)]
    """How many ranks wrote it."""
    block: Annotated[StrictInt, Field(ge=4096, le=1 << 30, multiple_of=64)]
    """Bytes under one checksum; see `Piece.sums`."""
    checksum: Literal["crc32", "xxh3"] = "crc32"
    """What `Piece.sums` are; headers, small files and this index have a CRC-32 whatever it is."""
    files: dict[StrictStr, FileEntry]
    tensors: dict[StrictStr, dict[StrictStr, Entry]]
    """kind -> name -> tensor."""
    facts: dict[StrictStr, Any]
    """What the writer said about the run, JSON-encoded: ties, groups, frozen names, settings."""


@dataclass(frozen=True)
class Index:
    """A checkpoint that was opened: validated, not yet read. Plain data; holds no file open."""

    directory: Path
    tag: str
    crc32: int
    """Checksum of the content: two ranks with equal ones look at the same checkpoint."""
    content: Content
    lacking: frozenset[str] = frozenset()
    """Files that are in other nodes' folders; none where all ranks see one folder."""
    fetched: Path | None = None
    """Where those of them are that have been brought here."""

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the writer said about the run, as it was given to `save`."""
        facts: dict[str, Any] = plain.decode(self.content.facts)
        return facts

    @property
    def ties(self) -> dict[str, str]:
        """Alias -> the name under which the tied tensor is stored."""
        return dict(self.facts.get("ties", {}))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of tensors it holds, such as `{"param", "buffer", "optim.exp_avg"}`."""
        return frozenset(self.content.tensors)

    @property
    def world(self) -> int:
        """How many ranks wrote it."""
        return self.content.world

    def entry(self, key: Key) -> Entry | None:
        """The tensor called `key`, or None."""
        return self.content.tensors.get(key.kind, {}).get(key.name)

    def entries(self) -> Iterator[tuple[Key, Entry]]:
        """All tensors."""
        for kind, named in self.content.tensors.items():
            for name, entry in named.items():
                yield Key(kind, name), entry

    def holding(self, tensors: Mapping[Key, Any], facts: Mapping[str, Any]) -> Index:
        """The same checkpoint as if `tensors`, which are some of its own under whatever names, were all it has."""
        named: dict[str, dict[str, Any]] = {}
        for key, entry in tensors.items():
            named.setdefault(key.kind, {})[key.name] = entry
        encoded = plain.encode(facts, path="facts")
        return replace(self, content=self.content.model_copy(update={"tensors": named, "facts": encoded}))

    def place(self, file: str) -> Path:
        """Where `file` is."""
        return (self.fetched if self.fetched and file in self.lacking else self.directory) / file

    def damaged(self, file: str, fault: str) -> CheckpointError:
        """The error that says that `file` is not what was written."""
        return CheckpointError(f"checkpoint {self.directory}: {file}: {fault}. {_MEND}")


def render_index(content: Mapping[str, Any]) -> bytes:
    """The bytes of `index.json`; one line per tensor, so that people can look at it and compare two."""
    tensors = ",\n".join(
        f"{plain.render(kind)}:{{\n"
        + ",\n".join(f"{plain.render(name)}:{plain.render(entry)}" for name, entry in named.items())
        + "}"
        for kind, named in content["tensors"].items()
    )
    rest = [f"{plain.render(key)}:{plain.render(value)}" for key, value in content.items() if key != "tensors"]
    body = ("{" + ",\n".join([*rest, f'"tensors":{{{tensors}}}']) + "}").encode()
    return b'{"sheer_checkpoint":%d,"crc32":"%08x","content":\n%s%s' % (VERSION, zlib.crc32(body), body, _TAIL)


def read_index_bytes(directory: Path) -> bytes:
    """The raw bytes of a checkpoint's index."""
    path = directory / INDEX
    try:
        size = path.stat().st_size
        if size > _LARGEST:
            raise CheckpointError(f"{path} is {size} bytes; an index has at most {_LARGEST}. {_MEND}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from error


def parse_index(raw: bytes, *, directory: Path, tag: str, local: bool = False) -> Index:
    """The checkpoint in `directory` whose index is `raw`; with `local` other folders may have some of its files.

    Raises CheckpointError, before anything large is allocated, where the index does not hold together or a file that
    it names is missing or has another size.
    """
    path = directory / INDEX
    body, crc32 = _unwrap(raw, path)
    try:
        content = Content.model_validate(plain.parse(body, what=str(path)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: {where:.200}: {first['msg']}, got {first['input']!r:.80}. {_MEND}") from error
    for kind, named in content.tensors.items():
        for name, entry in named.items():
            fault = _entry_fault(Key(kind, name), entry, content)
            if fault:
                raise CheckpointError(f"{path}: {Key(kind, name)}: {fault}. {_MEND}")
    lacking = frozenset(file for file in content.files if local and not (directory / file).exists())
    index = Index(directory, tag, crc32, content, lacking)
    _check_ties(index)
    _check_files(index)
    return index


def _unwrap(raw: bytes, path: Path) -> tuple[bytes, int]:
    """The content's bytes and their checksum, which was found to match."""
    head = _HEAD.match(raw)
    if head is None:
        raise CheckpointError(f"{path} does not begin like a checkpoint index. {_MEND}")
    version, crc32 = int(head[1]), int(head[2], 16)
    if version > VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this Sheer reads up to {VERSION}. Load it with a newer Sheer."
        )
    body = raw[head.end() : -len(_TAIL)]
    if version < 1 or not raw.endswith(_TAIL) or zlib.crc32(body) != crc32:
        raise CheckpointError(f"{path}: the content does not match its checksum. {_MEND}")
    return body, crc32


def _entry_fault(key: Key, entry: Entry, content: Content) -> str:
    """What is wrong with one tensor's description; empty when nothing is."""
    if not known_kind(key.kind):
        return "its kind is not 'param', 'buffer' or 'optim.<state name>'"
    if entry.dtype not in DTYPES:
        return f"dtype {entry.dtype!r:.40} is unknown"
    if math.prod(filter(None, entry.shape)) >= 1 << 63:
        return "its shape has more elements than a tensor can have"
    fault = tiling_fault(entry.numel, (Interval(p.start, p.stop, p.file or "the index") for p in entry.pieces))
    if fault:
        return fault
    return next(filter(None, (_piece_fault(piece, entry, content) for piece in entry.pieces)), "")


def _piece_fault(piece: Piece, entry: Entry, content: Content) -> str:
    nbytes = (piece.stop - piece.start) * entry.torch_dtype.itemsize
    if piece.inline is not None:
        held = len(piece.inline) // 2
        if piece.file or piece.at or piece.sums or held != nbytes:
            return f"an inline piece of {nbytes} bytes holds {held}, or names a file besides"
        return ""
    file = content.files.get(piece.file)
    if file is None:
        return f"a piece is in the file {piece.file!r:.80}, which the index does not list"
    if piece.at < file.head or piece.at + nbytes > file.size:
        return f"a piece lies outside the file {piece.file!r} ({file.size} bytes)"
    if len(piece.sums) != -(-nbytes // content.block):
        return f"a piece of {nbytes} bytes has {len(piece.sums)} checksums"
    return ""


def _check_ties(index: Index) -> None:
    """Every alias must lead to a stored name, and must not be stored itself."""
    stored = {name for kind in ("param", "buffer") for name in index.content.tensors.get(kind, {})}
    fault = ties_fault(index.facts.get("ties", {}), stored)
    if fault:
        raise CheckpointError(f"{index.directory / INDEX}: {fault}. {_MEND}")


def ties_fault(ties: Any, stored: set[str]) -> str:
    """What is wrong with `ties` (alias -> stored name); empty when nothing is."""
    if not isinstance(ties, dict):
        return "facts['ties'] is not a mapping of alias to owner"
    for alias, owner in ties.items():
        if not isinstance(alias, str) or not isinstance(owner, str) or owner not in stored:
            return f"{alias!r:.100} is tied to {owner!r:.100}, which is not among the stored parameters and buffers"
        if alias in stored:
            return f"{alias!r:.100} is tied to {owner!r:.100} and stored itself too"
    return ""


def _check_files(index: Index) -> None:
    """Every file is there, has its size, and is covered by its header and pieces without gap or overlap."""
    held: dict[str, list[Interval]] = {name: [] for name in index.content.files}
    for key, entry in index.entries():
        for piece in entry.pieces:
            if piece.inline is None:
                nbytes = (piece.stop - piece.start) * entry.torch_dtype.itemsize
                held[piece.file].append(Interval(piece.at, piece.at + nbytes, str(key)))
    for name, file in index.content.files.items():
        if not re.fullmatch(r"rank\d{5,9}\.safetensors|state\.json|rng\.safetensors", name):
            raise index.damaged(INDEX, f"{name!r:.80} is not a name that a checkpoint's file can have")
        fault = tiling_fault(file.size, [Interval(0, file.head, "its header"), *held[name]])
        if fault:
            raise index.damaged(INDEX, f"bytes of {name}: {fault}")
        if name not in index.lacking:
            _check_size(index, name, file)
    if STATE not in index.content.files:
        raise index.damaged(INDEX, f"{STATE} is not listed")


def _check_size(index: Index, name: str, file: FileEntry) -> None:
    path = index.directory / name
    if not path.is_file():
        raise index.damaged(
            name, "the file is missing (it may be in another node's folder, if that is how it was saved)"
        )
    size = path.stat().st_size
    if size != file.size:
        raise index.damaged(name, f"the file has {size} bytes, {file.size} were written")
