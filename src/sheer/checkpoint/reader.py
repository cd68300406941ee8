"""Reading tensors: which bytes an interval needs, fetched block by block, each block's checksum verified.

Several threads fetch at once, a file at a time in the order of the bytes; each takes one chunk, so that memory
besides the destinations stays a few chunks whatever the sizes of tensors and pieces are.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from sheer.checkpoint.index import Entry, Index, Piece
from sheer.checkpoint.shard import Key
from sheer.checkpoint.tensorfile import CHUNK, checksums
from sheer.errors import CheckpointError

_THREADS = min(4, os.cpu_count() or 1)


class Request(NamedTuple):
    """An interval of a stored tensor to be read."""

    key: Key
    start: int
    """First element."""
    out: torch.Tensor
    """1-D, contiguous, on the host: where the elements go, converted to its dtype."""


class _Fetch(NamedTuple):
    """One chunk of a piece: whole blocks of it, and the part of them that is wanted."""

    key: Key
    piece: Piece
    dtype: torch.dtype
    first: int
    """Offset in the piece of the chunk's first byte, a multiple of the block."""
    nbytes: int
    skip: int
    """Elements at the chunk's start that are not wanted."""
    out: torch.Tensor


def host_empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor in host memory to be filled, whatever torch's default device is."""
    # A bytearray rather than numpy's memory: numpy asks for huge pages, which a busy system is slow to find (measured:
    # three times the system time of ordinary ones). Never empty, since torch makes no tensor of that.
    return torch.frombuffer(bytearray(max(numel, 1) * dtype.itemsize), dtype=dtype)[:numel]


def convertible(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """True where `stored` has a meaning as `wanted`: not complex as real, fractions as integers, numbers as bool."""
    return torch.can_cast(stored, wanted)


def read(index: Index, requests: Iterable[Request]) -> int:
    """Fill every request's `out`; the number of bytes fetched.

    Raises CheckpointError, naming file and tensor, where bytes are missing or not those that were written.
    """
    fetches: list[_Fetch] = []
    for request in requests:
        entry = index.entry(request.key)
        assert entry is not None, "requests are planned from the index"
        for piece in entry.pieces:
            fetches.extend(_plan(request, entry, piece, index.content.block))
    for fetch in (f for f in fetches if f.piece.inline is not None):
        _place(fetch, np.frombuffer(bytes.fromhex(fetch.piece.inline or ""), np.uint8).copy())
    stored = sorted((f for f in fetches if f.piece.inline is None), key=lambda f: (f.piece.file, f.piece.at, f.first))
    with ThreadPoolExecutor(_THREADS) as pool:
        for file, group in itertools.groupby(stored, key=lambda f: f.piece.file):
            _read_file(index, file, list(group), pool)
    return sum(fetch.nbytes for fetch in stored)


def read_small(index: Index, file: str) -> bytes:
    """The whole of a file that is under one checksum."""
    try:
        data = (index.directory / file).read_bytes()
    except OSError as error:
        raise index.damaged(file, f"it cannot be read ({error.strerror or error})") from error
    if zlib.crc32(data) != index.content.files[file].crc32:
        raise index.damaged(file, "the content does not match its checksum")
    return data


def _plan(request: Request, entry: Entry, piece: Piece, block: int) -> Iterator[_Fetch]:
    """The chunks of `piece` that hold elements which `request` wants."""
    low = max(piece.start, request.start)
    high = min(piece.stop, request.start + request.out.numel())
    width = entry.torch_dtype.itemsize
    length = (piece.stop - piece.start) * width
    step = length if piece.inline is not None else max(CHUNK // block, 1) * block
    first = (low - piece.start) * width // block * block
    while low < high:
        nbytes = min(step, length - first)
        until = min(high, piece.start + (first + nbytes) // width)
        skip = low - (piece.start + first // width)
        out = request.out[low - request.start : until - request.start]
        yield _Fetch(request.key, piece, entry.torch_dtype, first, _needed(skip, out, width, block, nbytes), skip, out)
        low, first = until, first + nbytes


def _needed(skip: int, out: torch.Tensor, width: int, block: int, most: int) -> int:
    """Bytes to fetch for the first `skip + len(out)` elements: whole blocks, at most `most`."""
    return min(most, -(-(skip + out.numel()) * width // block) * block)


def _read_file(index: Index, file: str, fetches: list[_Fetch], pool: ThreadPoolExecutor) -> None:
    try:
        fd = os.open(index.directory / file, os.O_RDONLY)
    except OSError as error:
        raise index.damaged(file, f"it cannot be opened ({error.strerror or error})") from error
    try:
        _check_head(index, file, fd)
        for _ in pool.map(lambda fetch: _fetch(index, fd, fetch), fetches):
            pass
    except OSError as error:
        raise index.damaged(file, f"it cannot be read ({error.strerror or error})") from error
    finally:
        os.close(fd)


def _check_head(index: Index, file: str, fd: int) -> None:
    entry = index.content.files[file]
    head = memoryview(bytearray(entry.head))
    if _read_fully(fd, head, 0) < entry.head or zlib.crc32(head) != entry.crc32:
        raise index.damaged(file, "its header does not match its checksum")


def _fetch(index: Index, fd: int, fetch: _Fetch) -> None:
    """Read one chunk, straight into its destination where dtype and extent are the same."""
    direct = fetch.out.dtype == fetch.dtype and fetch.out.nbytes == fetch.nbytes
    raw = fetch.out.view(torch.uint8).numpy() if direct else np.empty(fetch.nbytes, np.uint8)
    got = _read_fully(fd, raw.data, fetch.piece.at + fetch.first)
    if got < fetch.nbytes:
        raise index.damaged(fetch.piece.file, f"{fetch.key}: the file ends early")
    block = index.content.block
    begin = fetch.first // block
    sums = checksums(raw.data, block)
    for number, (found, written) in enumerate(zip(sums, fetch.piece.crc32[begin:], strict=False)):
        if found != written:
            at = fetch.piece.at + fetch.first + number * block
            fault = f"{fetch.key}: bytes {at} to {at + block} do not match their checksum"
            raise index.damaged(fetch.piece.file, fault)
    if not direct:
        _place(fetch, raw)


def _place(fetch: _Fetch, raw: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Convert the wanted part of a chunk into its destination."""
    stored = torch.from_numpy(raw).view(fetch.dtype)[fetch.skip : fetch.skip + fetch.out.numel()]
    fetch.out.copy_(stored)
    exact = fetch.dtype.is_floating_point or fetch.dtype.is_complex or fetch.dtype == fetch.out.dtype
    if not exact and not torch.equal(fetch.out.to(fetch.dtype), stored):
        raise CheckpointError(
            f"{fetch.key} holds integers (stored as {fetch.dtype}) that {fetch.out.dtype} cannot hold exactly. "
            f"Load it into a tensor of dtype {fetch.dtype}."
        )


def _read_fully(fd: int, out: memoryview, at: int) -> int:
    """Fill `out` from offset `at`; how much of it was there."""
    done = 0
    while done < len(out):
        got = os.preadv(fd, [out[done:]], at + done)
        if got == 0:
            break
        done += got
    return done
