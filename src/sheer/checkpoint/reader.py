"""Reading tensors: which bytes an interval needs, read block by block, each block's checksum verified as it arrives.

Several threads read at once, a file at a time in the order of the bytes. Each takes one chunk and goes through it by
blocks, so that a block is verified while it is still in the processor's cache, and memory besides the destinations
stays a few chunks whatever the sizes of tensors and pieces are.
"""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

import torch

from sheer.checkpoint import checksum
from sheer.checkpoint.index import Entry, Index, Piece
from sheer.checkpoint.shard import Key, nothing
from sheer.checkpoint.tensorfile import CHUNK
from sheer.errors import CheckpointError

_THREADS = min(4, os.cpu_count() or 1)
_MOST_OPEN = 256  # files held open at once; processes are commonly allowed a thousand


class Request(NamedTuple):
    """An interval of a stored tensor to be read."""

    key: Key
    start: int
    """First element."""
    out: torch.Tensor
    """1-D, contiguous: where the elements go, converted to its dtype."""
    rest: Callable[[torch.Tensor], None] = nothing
    """Called with every part of `out` that has been filled."""


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
    rest: Callable[[torch.Tensor], None]

    @property
    def direct(self) -> bool:
        """Whether the bytes of a file, all of them, are the destination's."""
        if self.piece.inline is not None:
            return False
        return self.out.is_cpu and self.out.dtype == self.dtype and self.out.nbytes == self.nbytes

    @property
    def exact(self) -> bool:
        """Whether every value converts with its meaning kept; integers may not fit."""
        return self.dtype.is_floating_point or self.dtype.is_complex or self.dtype == self.out.dtype


def host_empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor in host memory to be filled, whatever torch's default device is."""
    # A bytearray rather than numpy's memory: numpy asks for huge pages, which a busy system is slow to find (measured:
    # three times the system time of ordinary ones). Never empty, since torch makes no tensor of that.
    return torch.frombuffer(bytearray(max(numel, 1) * dtype.itemsize), dtype=dtype)[:numel]


def convertible(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """True where `stored` has a meaning as `wanted`: not complex as real, fractions as integers, numbers as bool."""
    return torch.can_cast(stored, wanted)


class Reader:
    """Reads the tensors of one checkpoint. A context manager: it holds threads, their scratch memory and open files.

    A file that was opened stays what it was, also where another save replaces the checkpoint meanwhile (for up to 256
    files of one rank).
    """

    def __init__(self, index: Index, *, told: Callable[[int], None] | None = None) -> None:
        """`told` is called with the bytes of each chunk once it is read. Raises CheckpointError where the checkpoint's
        kind of checksum cannot be had."""
        self._index = index
        self._told = told or _nobody
        self._checksum = checksum.named(index.content.checksum)
        self._files: dict[str, int] = {}
        self._scratch = threading.local()
        self._pool = ThreadPoolExecutor(_THREADS)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()
        while self._files:
            os.close(self._files.popitem()[1])

    def fill(self, requests: Iterable[Request]) -> int:
        """Fill every request's `out`; the number of bytes read.

        Raises CheckpointError, naming file and tensor, where bytes are missing or not those that were written.
        """
        return self._each(requests, self._fill)

    def check(self, requests: Iterable[Request]) -> int:
        """Find all that `fill` would find wrong, leaving every `out` as it is; the number of bytes read."""
        return self._each(requests, self._check)

    def _each(self, requests: Iterable[Request], work: Callable[[_Fetch, int], None]) -> int:
        """Do `work` with every chunk that `requests` need and the file that it is in."""
        fetches: list[_Fetch] = []
        for request in requests:
            entry = self._index.entry(request.key)
            assert entry is not None, "requests are planned from the index"
            for piece in entry.pieces:
                fetches.extend(_plan(request, entry, piece, self._index.content.block))
        stored = sorted(fetches, key=lambda f: (f.piece.file, f.piece.at, f.first))
        for file, group in itertools.groupby(stored, key=lambda f: f.piece.file):
            try:
                fd = self._open(file) if file else -1  # what stands in the index needs none
                chunks = list(group)
                done = self._pool.map(lambda fetch: work(fetch, fd), chunks)  # noqa: B023  (ends before it changes)
                for fetch, _ in zip(chunks, done, strict=True):
                    self._told(fetch.nbytes)
            except OSError as error:
                raise self._index.damaged(file, f"it cannot be read ({error.strerror or error})") from error
        return sum(fetch.nbytes for fetch in stored if fetch.piece.inline is None)

    def _open(self, file: str) -> int:
        """The open file, its header verified."""
        if file in self._files:
            return self._files[file]
        if len(self._files) >= _MOST_OPEN:
            os.close(self._files.pop(next(iter(self._files))))
        fd = self._files[file] = os.open(self._index.place(file), os.O_RDONLY)
        entry = self._index.content.files[file]
        head = memoryview(bytearray(entry.head))
        if _read_fully(fd, head, 0) < entry.head or zlib.crc32(head) != entry.crc32:
            raise self._index.damaged(file, "its header does not match its checksum")
        return fd

    def _fill(self, fetch: _Fetch, fd: int) -> None:
        """Read one chunk, straight into its destination where dtype and extent are the same."""
        if fetch.direct:
            self._read(fetch, fd, fetch.out.view(torch.uint8).numpy().data)
        else:
            fetch.out.copy_(self._converted(fetch, fd))
        fetch.rest(fetch.out)

    def _check(self, fetch: _Fetch, fd: int) -> None:
        """Read one chunk and let it go; where conversion cannot fail, no more than a block of it at a time."""
        if fetch.exact and fetch.piece.inline is None:
            self._read(fetch, fd, self._room(min(fetch.nbytes, self._index.content.block)))
        else:
            self._converted(fetch, fd)

    def _converted(self, fetch: _Fetch, fd: int) -> torch.Tensor:
        """The wanted elements of a chunk as they are stored, found to be what the destination can hold."""
        if fetch.piece.inline is None:
            raw = self._room(fetch.nbytes)
            self._read(fetch, fd, raw)
        else:
            raw = memoryview(bytearray.fromhex(fetch.piece.inline))
        stored = torch.frombuffer(raw, dtype=fetch.dtype)[fetch.skip : fetch.skip + fetch.out.numel()]
        if not fetch.exact and not torch.equal(stored.to(fetch.out.dtype).to(fetch.dtype), stored):
            raise CheckpointError(
                f"{fetch.key} holds integers (stored as {fetch.dtype}) that {fetch.out.dtype} cannot hold exactly. "
                f"Load it into a tensor of dtype {fetch.dtype}."
            )
        return stored

    def _read(self, fetch: _Fetch, fd: int, into: memoryview) -> None:
        """Read a chunk block by block and verify each; `into` is used again and again where it is smaller."""
        block = self._index.content.block
        written = fetch.piece.sums[fetch.first // block :]
        for number, at in enumerate(range(0, fetch.nbytes, block)):
            size = min(block, fetch.nbytes - at)
            place = at % len(into)
            part = into[place : place + size]
            where = fetch.piece.at + fetch.first + at
            if _read_fully(fd, part, where) < size:
                raise self._index.damaged(fetch.piece.file, f"{fetch.key}: the file ends early")
            if self._checksum(part) != written[number]:
                fault = f"{fetch.key}: bytes {where} to {where + size} do not match their checksum"
                raise self._index.damaged(fetch.piece.file, fault)

    def _room(self, nbytes: int) -> memoryview:
        """Memory of this thread's own, the same each time: fresh memory costs more than what is done with it."""
        room: memoryview = getattr(self._scratch, "room", memoryview(b""))
        if len(room) < nbytes:
            room = self._scratch.room = memoryview(bytearray(nbytes))
        return room[:nbytes]


def _nobody(nbytes: int) -> None:
    """Progress that is not followed."""


def read_small(index: Index, file: str) -> bytes:
    """The whole of a file that is under one checksum."""
    try:
        data = index.place(file).read_bytes()
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
        needed = _needed(skip, out, width, block, nbytes)
        yield _Fetch(request.key, piece, entry.torch_dtype, first, needed, skip, out, request.rest)
        low, first = until, first + nbytes


def _needed(skip: int, out: torch.Tensor, width: int, block: int, most: int) -> int:
    """Bytes to fetch for the first `skip + len(out)` elements: whole blocks, at most `most`."""
    return min(most, -(-(skip + out.numel()) * width // block) * block)


def _read_fully(fd: int, out: memoryview, at: int) -> int:
    """Fill `out` from offset `at`; how much of it was there."""
    done = 0
    while done < len(out):
        got = os.preadv(fd, [out[done:]], at + done)
        if got == 0:
            break
        done += got
    return done
