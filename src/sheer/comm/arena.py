"""Big transient buffers, and buffers whose memory comes and goes."""

from __future__ import annotations

import torch

from sheer import device as devices
from sheer.comm.tickets import DONE, Ticket


class Arena:
    """Allocates and frees big transient buffers, on the compute stream, and keeps a few returned ones for reuse.

    A buffer comes back only when no lane holds it any more. `live` and `peak` count bytes handed out; what lies idle is
    never more than twice the largest buffer, whatever sizes there are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.live = 0
        self.peak = 0
        self._largest = 0
        self._idle: list[torch.Tensor] = []  # blocks of bytes, the longest idle first
        self._out: dict[int, torch.Tensor] = {}  # address -> the block that was handed out

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of `numel` elements with unspecified contents."""
        size = numel * dtype.itemsize
        self._largest = max(self._largest, size)
        block = self._fitting(size)
        if block is None:
            block = devices.aligned_zeros(size, dtype=torch.uint8, device=self.device)
        self._out[block.data_ptr()] = block
        self.live += size
        self.peak = max(self.peak, self.live)
        return block[:size].view(dtype)

    def _fitting(self, size: int) -> torch.Tensor | None:
        """The smallest idle block that has room, if it does not waste more than half of itself."""
        fitting = [block for block in self._idle if size <= block.numel() <= 2 * size]
        if not fitting:
            return None
        best = min(fitting, key=lambda block: block.numel())
        self._idle = [block for block in self._idle if block is not best]
        return best

    def release(self, buffer: torch.Tensor, *, after: Ticket) -> None:
        """Take `buffer` back; `after` is the ticket that last used it and must have been waited for."""
        assert after.done, "a buffer was released while a lane still held it"
        self.live -= buffer.nbytes
        self._idle.append(self._out.pop(buffer.data_ptr()))
        while self.idle > 2 * self._largest:
            self._idle.pop(0)

    def forget(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that no lane ever held."""
        self.release(buffer, after=DONE)

    @property
    def idle(self) -> int:
        """Bytes kept for reuse."""
        return sum(block.numel() for block in self._idle)

    def trim(self) -> None:
        """Free every idle buffer."""
        self._idle.clear()


class Vault:
    """Buffers with one storage for life, whose memory is taken for use and given back: views of them stay what they
    are, and so do tensors that autograd has saved. `live` and `peak` count bytes taken.

    Nothing may read a buffer between `free` and the next `fill`: there is no memory behind it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.live = 0
        self.peak = 0

    def make(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new buffer, to be freed once its views have been made."""
        buffer = torch.empty(numel, dtype=dtype, device=self._device)
        self._count(buffer.nbytes)
        return buffer

    def fill(self, buffer: torch.Tensor) -> None:
        """Memory of unspecified contents for `buffer`."""
        buffer.untyped_storage().resize_(buffer.nbytes)
        self._count(buffer.nbytes)

    def free(self, buffer: torch.Tensor, *, after: Ticket = DONE) -> None:
        """Give the memory back; `after` is the ticket that last used it and must have been waited for."""
        assert after.done, "a buffer was freed while a lane still held it"
        buffer.untyped_storage().resize_(0)
        self._count(-buffer.nbytes)

    def _count(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)
