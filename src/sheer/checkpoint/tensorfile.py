"""One rank's tensor file: the safetensors format, written in one sequential pass and flushed to the disk.

The writer is our own, for three reasons: each block's checksum is taken just before it goes out, while it is in the
processor's cache, tensors on an accelerator come to the host a chunk at a time, and the file is synced before anyone
relies on it. Any safetensors reader reads the result.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sheer.checkpoint import plain
from sheer.checkpoint.checksum import Checksum
from sheer.checkpoint.index import BLOCK, INLINE
from sheer.checkpoint.shard import SAFETENSORS_CODES, Shard, as_bytes

CHUNK = 8 * BLOCK
"""Bytes that are written, or read, in one go."""

Tensors = dict[str, dict[str, dict[str, Any]]]
"""kind -> name -> an `index.Entry` as JSON data."""


class Written(NamedTuple):
    """What one rank wrote, as the index will say it."""

    files: dict[str, dict[str, int]]
    """File name -> `index.FileEntry` as JSON data."""
    tensors: Tensors


def stored_nbytes(shards: Sequence[Shard]) -> int:
    """Bytes that these shards take in a file, its header left aside."""
    return sum(shard.data.nbytes for shard in shards if not _is_small(shard))


def write_shards(path: Path, shards: Sequence[Shard], *, checksum: Checksum) -> Written:
    """Write `shards` to the new file `path` and flush it; small tensors go to the index, and no file is made for none.

    Errors of the file system come as they are (OSError).
    """
    tensors: Tensors = {}
    for shard in filter(_is_small, shards):
        _add(tensors, shard, {"inline": as_bytes(shard.data).hex()})
        shard.rest(shard.data)
    # Wide elements first, so that every tensor starts at a multiple of its element size.
    large = sorted((s for s in shards if not _is_small(s)), key=lambda s: -s.data.dtype.itemsize)
    if not large:
        return Written({}, tensors)
    header = _header(large)
    with path.open("xb", buffering=0) as file:
        write_fully(file.fileno(), header)
        at = len(header)
        for shard in large:
            sums = _write_one(file.fileno(), shard, checksum)
            _add(tensors, shard, {"file": path.name, "at": at, "sums": sums})
            at += shard.data.nbytes
        os.fsync(file.fileno())
    entry = {"size": at, "head": len(header), "crc32": zlib.crc32(header)}
    return Written({path.name: entry}, tensors)


def small_entry(data: bytes) -> dict[str, int]:
    """The `index.FileEntry` of a file that is `data`, all of it under one checksum, as JSON data."""
    return {"size": len(data), "head": len(data), "crc32": zlib.crc32(data)}


def write_bytes(path: Path, data: bytes) -> None:
    """Write the new file `path` and flush it."""
    with path.open("xb", buffering=0) as file:
        write_fully(file.fileno(), data)
        os.fsync(file.fileno())


def write_fully(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`; `os.write` may stop early."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _write_one(fd: int, shard: Shard, checksum: Checksum) -> list[int]:
    """Write one tensor block by block; the checksum of each."""
    sums: list[int] = []
    step = CHUNK // shard.data.dtype.itemsize
    for start in range(0, shard.data.numel(), step):
        part = shard.data[start : start + step]
        chunk = as_bytes(part)
        for at in range(0, len(chunk), BLOCK):
            block = chunk[at : at + BLOCK]
            sums.append(checksum(block))
            write_fully(fd, block)
        shard.rest(part)
    return sums


def _is_small(shard: Shard) -> bool:
    """True for a whole tensor that fits into the index."""
    numel = shard.data.numel()
    whole = numel == math.prod(shard.shape)
    return whole and shard.data.nbytes <= INLINE


def _add(tensors: Tensors, shard: Shard, place: dict[str, Any]) -> None:
    entry = {"dtype": str(shard.data.dtype).removeprefix("torch."), "shape": list(shard.shape), "pieces": []}
    named = tensors.setdefault(shard.kind, {})
    named.setdefault(shard.name, entry)["pieces"].append({"start": shard.start, "stop": shard.stop, **place})


def _header(shards: Sequence[Shard]) -> bytes:
    """The safetensors header: 8 bytes of length, then JSON padded so that the data starts at a multiple of 64."""
    described: dict[str, Any] = {}
    at = 0
    for shard in shards:
        code = SAFETENSORS_CODES[shard.data.dtype]
        width = 1 if code == "U8" else shard.data.dtype.itemsize
        described[f"{shard.kind}:{shard.name}[{shard.start}:{shard.stop}]"] = {
            "dtype": code,
            "shape": [shard.data.nbytes // width],
            "data_offsets": [at, at + shard.data.nbytes],
        }
        at += shard.data.nbytes
    text = plain.render(described).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text
