"""A depot in files on a local disk, mapped into the host's memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch

from sheer import device as devices
from sheer.comm.depots import Copy
from sheer.errors import ConfigError


class Files:
    """Files on a local disk, mapped into the host's memory.

    A file has no name from the moment it is made, so the system removes it with the last tensor in it or with the
    process, however that ends. Its blocks are taken when it is made, so a full disk is an error there and not a crash
    later. Pages in use are read and written by the system; `rest` takes them out of this process's memory, `expect`
    brings them in on another thread.
    """

    paged = True

    def __init__(self, path: str, *, key: str) -> None:
        """Raises ConfigError, naming `key`, where no file can be made in `path`, or the system is not Linux."""
        if sys.platform != "linux":
            raise ConfigError(f"{key}: state in files needs Linux; on {sys.platform} it can be in host memory ('cpu')")
        self.device = devices.host()
        self._path, self._key = path, key
        self._maps: dict[int, weakref.ref[ctypes.Array[ctypes.c_ubyte]]] = {}
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="sheer-files")
        self._coming: dict[int, Future[None]] = {}  # by address
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._map(mmap.PAGESIZE)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Depot`. Raises ConfigError where the disk is full."""
        pages = -(-max(numel, 1) * dtype.itemsize // mmap.PAGESIZE)
        return torch.frombuffer(self._map(pages * mmap.PAGESIZE), dtype=dtype)[:numel]

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Depot`."""
        return self.zeros(numel, dtype)

    def take(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """See `Depot`."""
        target.copy_(source)
        return Copy()

    def add(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """See `Depot`."""
        target.add_(source.to(self.device))
        return Copy()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """See `Depot`. Raises ConfigError where there is none."""
        with self._file(nbytes):
            yield

    @contextmanager
    def _file(self, nbytes: int) -> Iterator[int]:
        """A new file whose blocks are there, open. It stays while it is mapped."""
        with ExitStack() as stack:
            try:
                file = stack.enter_context(tempfile.TemporaryFile(dir=self._path))
                os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
            except OSError as error:
                raise ConfigError(
                    f"{self._key}={self._path!r}: a file of {nbytes / 1e6:,.1f} MB cannot be made there "
                    f"({error.strerror or error}). Name an existing directory that this process may write to, on a "
                    "local disk with room for what all ranks on this machine keep there"
                ) from error
            yield file.fileno()

    def _map(self, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        """Memory of a new file. It is unmapped when no tensor refers to it."""
        with self._file(nbytes) as fd:
            address = self._libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise MemoryError(f"no address space for a file of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        # At the end of the process the system unmaps; until then whoever still reads may.
        weakref.finalize(memory, self._libc.munmap, address, nbytes).atexit = False
        self._maps = {at: ref for at, ref in self._maps.items() if ref() is not None}
        self._maps[address] = weakref.ref(memory)
        return memory

    def holds(self, tensor: torch.Tensor) -> bool:
        """See `Depot`."""
        return self._memory_of(tensor) is not None

    def _memory_of(self, tensor: torch.Tensor) -> ctypes.Array[ctypes.c_ubyte] | None:
        """The mapped memory that `tensor` is in."""
        ref = self._maps.get(tensor.untyped_storage().data_ptr())
        return None if ref is None else ref()

    @contextmanager
    def brought(self, tensor: torch.Tensor, *, into: torch.Tensor) -> Iterator[torch.Tensor]:
        """See `Depot`."""
        into.copy_(tensor)
        self.rest(tensor)
        yield into

    def expect(self, tensor: torch.Tensor) -> None:
        """See `Depot`."""
        memory = self._memory_of(tensor)
        if memory is not None:
            coming = self._ahead.submit(self._advise, memory, *_pages(tensor), _POPULATE_WRITE)
            self._coming[tensor.data_ptr()] = coming

    def rest(self, tensor: torch.Tensor) -> None:
        """See `Depot`. What was written is the file's already."""
        memory = self._memory_of(tensor)
        if memory is not None:
            coming = self._coming.pop(tensor.data_ptr(), None)
            if coming is not None and not coming.cancel():
                coming.result()  # or it would bring in what we let go of
            self._advise(memory, *_pages(tensor), mmap.MADV_DONTNEED)

    def _advise(self, _keep: ctypes.Array[ctypes.c_ubyte], address: int, nbytes: int, advice: int) -> None:
        """Advice may be refused; nothing depends on it. `_keep` is what must not be unmapped meanwhile."""
        self._libc.madvise(address, nbytes, advice)


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: make pages present and writable


def _pages(tensor: torch.Tensor) -> tuple[int, int]:
    """The address and length of the pages that `tensor` is in."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return start, tensor.data_ptr() + tensor.nbytes - start
