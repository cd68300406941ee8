"""The files of `torch.distributed.checkpoint`: `.metadata`, a pickle that says what is where, and `.distcp` files, in
which every item is a small archive of `torch.save`. Nothing of torch.distributed is needed to read them.
"""

from __future__ import annotations

import io
import itertools
import math
import mmap
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sheer.checkpoint.formats.pickles import Inert, read_pickle
from sheer.checkpoint.shard import DTYPES, Shard
from sheer.errors import CheckpointError

METADATA = ".metadata"

_LIBRARY = "torch.distributed.checkpoint."
_INERT = {
    *(f"{_LIBRARY}metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata")),
    *(f"{_LIBRARY}metadata.{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties")),
    *(f"{_LIBRARY}metadata._MEM_FORMAT_ENCODING", f"{_LIBRARY}filesystem._StorageInfo"),
    *("torch.serialization._get_layout", "pathlib.PosixPath", "pathlib.WindowsPath"),
}


class _Plain(pickle.Unpickler):
    """Reads data only: classes of the library as `Inert`, shapes as tuples, dtypes; refuses every other name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # A class of its own for each reading: a hostile pickle may set attributes of what it is given.
        self._inert = type("_Inert", (Inert,), {})

    def find_class(self, module: str, name: str) -> Any:
        """What `module.name` stands for here."""
        dtype = DTYPES.get(name) if module == "torch" else None
        if f"{module}.{name}" in _INERT:
            return self._inert
        if (module, name) == ("torch", "Size"):
            return tuple
        if dtype is not None:
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not among what DCP writes there")


class Stored:
    """One checkpoint: the tensors and objects in it by their path in the state dict that was saved."""

    def __init__(self, folder: Path) -> None:
        """Read `.metadata`. Raises CheckpointError where it is damaged or would do more than describe."""
        self._folder = folder
        self._maps: dict[str, mmap.mmap] = {}
        path = folder / METADATA
        try:
            content = vars(_Plain(io.BytesIO(path.read_bytes())).load())
            described = {key: vars(value) for key, value in content["state_dict_metadata"].items()}
            self._places = {_place(vars(key)): vars(value) for key, value in content["storage_data"].items()}
            paths = content.get("planner_data") or {key: (key,) for key in described}
        except (pickle.UnpicklingError, OSError, EOFError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as plain data: {error}.") from error
        self.tensors = {tuple(paths[key]): key for key, value in described.items() if "chunks" in value}
        """Path -> key."""
        self.objects = {tuple(paths[key]): key for key, value in described.items() if "chunks" not in value}
        self._described = described

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        size: tuple[int, ...] = tuple(self._described[key]["size"])
        return size

    def shards(self, key: str, kind: str, name: str) -> Iterator[Shard]:
        """The tensor `key` as shards of `kind` and `name`, mapped."""
        shape = self.shape(key)
        for chunk in map(vars, self._described[key]["chunks"]):
            offsets: tuple[int, ...] = tuple(chunk["offsets"])
            sizes: tuple[int, ...] = tuple(chunk["sizes"])
            if 0 in sizes and 0 not in shape:
                continue
            data = self._mapped(key, offsets, sizes)
            for number, (start, count) in enumerate(_runs(shape, offsets, sizes)):
                yield Shard(kind, name, shape, start, data[number * count :][:count])

    def object(self, key: str) -> Any:
        """What stands under `key`: plain data."""
        item = self._item(key, None)
        return read_pickle(item.path, within=item.view())

    def _item(self, key: str, offsets: tuple[int, ...] | None) -> _Item:
        place = self._places.get((key, offsets))
        if place is None:
            raise CheckpointError(f"{self._folder / METADATA} does not say where {key!r} {offsets or ''} is.")
        name, start, length = place["relative_path"], place["offset"], place["length"]
        if name != Path(name).name:
            raise CheckpointError(f"{self._folder / METADATA} names {name!r}, which is not a file beside it.")
        if name not in self._maps:
            self._maps[name] = _map(self._folder / name)
        mapped = self._maps[name]
        if not 0 <= start <= start + length <= len(mapped):
            raise CheckpointError(f"{self._folder / name} has {len(mapped)} bytes; {key!r} lies outside.")
        return _Item(self._folder / name, mapped, start, length)

    def _mapped(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """One chunk, flat: the bytes in the file where they lie there as they are, else a copy."""
        item = self._item(key, offsets)
        described = read_pickle(item.path, within=item.view(), device="meta")
        if not isinstance(described, torch.Tensor) or tuple(described.shape) != sizes:
            raise CheckpointError(f"{item.path}: {key!r} is not the tensor of {list(sizes)} that {METADATA} says.")
        dtype, numel, at = described.dtype, described.numel(), item.record()
        plain = described.is_contiguous() and not described.storage_offset() and numel
        if at is None or not plain or at + numel * dtype.itemsize > item.start + item.length:
            whole: torch.Tensor = read_pickle(item.path, within=item.view())
            return whole.contiguous().reshape(-1)
        return torch.frombuffer(item.mapped, dtype=dtype, count=numel, offset=at)


class _Item(NamedTuple):
    """One archive in a mapped file."""

    path: Path
    mapped: mmap.mmap
    start: int
    length: int

    def view(self) -> _View:
        """A file of these bytes alone."""
        return _View(memoryview(self.mapped)[self.start : self.start + self.length])

    def record(self) -> int | None:
        """Where in the file the only tensor's bytes begin; None where they do not lie there plainly."""
        with zipfile.ZipFile(self.view()) as archive:
            found = [info for info in archive.infolist() if "/data/" in info.filename]
        if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
            return None
        header = self.start + found[0].header_offset
        # Of its 30 bytes the last four are the lengths of two fields that follow.
        lengths = [int.from_bytes(self.mapped[header + at : header + at + 2], "little") for at in (26, 28)]
        return header + 30 + sum(lengths)


class _View(io.RawIOBase):
    """Memory as a file, without a copy."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def readinto(self, into: Any) -> int:
        """Fill `into` as far as there is something."""
        part = self._data[self._at : self._at + len(into)]
        into[: len(part)] = part
        self._at += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to `offset` from the start, from here, or from the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at


def _place(index: dict[str, Any]) -> tuple[str, tuple[int, ...] | None]:
    offset = index.get("offset")
    return index["fqn"], None if offset is None else tuple(offset)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The intervals of the flattened tensor that a box of it is, in order: where each starts, and how long all are."""
    cut = max((dim for dim, size in enumerate(shape) if sizes[dim] != size), default=0)
    inner = math.prod(shape[cut + 1 :])
    count = (sizes[cut] if shape else 1) * inner
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for outer in itertools.product(*(range(offsets[dim], offsets[dim] + sizes[dim]) for dim in range(cut))):
        start = sum(index * stride for index, stride in zip(outer, strides, strict=False))
        yield start + (offsets[cut] * inner if shape else 0), count
