"""Memory in which flat tensors rest between their uses: a device's, the host's, or files mapped into it.

A tensor of a depot is a plain tensor that anyone may read and write at any time. What differs is how much of the
machine's memory it holds on to. Nothing but `expect` and `rest` need be said, and both are only advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch

from sheer import device as devices


class Depot(Protocol):
    """Where tensors rest."""

    device: torch.device
    """What works on them where they are."""
    paged: bool
    """Whether tensors at rest leave memory."""

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new flat tensor that starts at a multiple of 256 bytes. Its memory goes when nobody refers to it."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new flat tensor of unspecified contents."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` rests here."""

    def brought(self, tensor: torch.Tensor, *, into: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """`tensor` as a lane of the device can send it: itself, or copied `into` a buffer there. What is submitted
        inside the block comes after the copy; nothing else does."""

    def take(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Copy `source`, which a device has computed, to `target`, which rests here. `source` must stay until the copy
        has left it."""

    def add(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Add `source` to `target`, likewise."""

    def reserve(self, nbytes: int) -> AbstractContextManager[None]:
        """Make sure that there is room for `nbytes`, where that can be known, and hold it inside the block."""

    def expect(self, tensor: torch.Tensor) -> None:
        """`tensor` will be used soon."""

    def rest(self, tensor: torch.Tensor) -> None:
        """`tensor` will not be used for a while."""


class Depots(NamedTuple):
    """Where each of the three rests that the placement table places."""

    param: Depot
    grad: Depot
    optim: Depot


class Copy:
    """A copy from the device to the host, under way or done."""

    def __init__(self, event: torch.Event | None = None, then: Callable[[], object] | None = None) -> None:
        """Without an `event` it is done. `then` is for the host to do with the result."""
        self._event, self._then = event, then
        if event is None:
            self._finish()

    @property
    def done(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._event is None

    def leave(self) -> None:
        """The source may be written again: what the device is asked to do from now on comes after the copy."""
        if self._event is not None:
            self._event.wait(torch.accelerator.current_stream())

    def wait(self) -> None:
        """The result may be read: wait until it is on the host."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
            self._finish()

    def _finish(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


class SideStream:
    """A second queue of `device` for copies that are to overlap its computation; nothing on a device that has none."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None if devices.is_host(device) else torch.Stream(device)

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """What is submitted inside runs after what the current stream has been asked to do so far, beside the rest.
        Whoever needs its result, or its buffers, orders itself behind it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            yield

    def mark(self, then: Callable[[], object] | None = None) -> Copy:
        """What has been submitted so far."""
        return Copy(None if self._stream is None else self._stream.record_event(), then)


class Memory:
    """Memory where everything stays; see the two below."""

    paged = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def holds(self, tensor: torch.Tensor) -> bool:
        """See `Depot`."""
        return tensor.device == self.device

    def reserve(self, nbytes: int) -> AbstractContextManager[None]:
        """Whether there is room is seen when it is taken."""
        return nullcontext()

    def expect(self, tensor: torch.Tensor) -> None:
        """It is there."""

    def rest(self, tensor: torch.Tensor) -> None:
        """It stays."""


class DeviceMemory(Memory):
    """The memory of the device that trains."""

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Depot`."""
        return devices.aligned_zeros(numel, dtype=dtype, device=self.device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Depot`."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def brought(self, tensor: torch.Tensor, *, into: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """It is there."""
        return nullcontext(tensor)

    def take(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """See `Depot`. The device does one after the other."""
        target.copy_(source)
        return Copy()

    def add(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """See `Depot`."""
        target.add_(source)
        return Copy()


class HostMemory(Memory):
    """The machine's own memory, page-locked where it is `pinned`, so that a device copies by itself."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        """`device` is the one that trains."""
        super().__init__(devices.host())
        self._pinned = pinned and not devices.is_host(device)
        self._side = SideStream(device)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Depot`."""
        make = devices.pinned_zeros if self._pinned else devices.aligned_zeros
        return make(numel, dtype=dtype, device=self.device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Depot`."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self._pinned)

    @contextmanager
    def brought(self, tensor: torch.Tensor, *, into: torch.Tensor) -> Iterator[torch.Tensor]:
        """See `Depot`."""
        with self._side.after_current():
            yield into.copy_(tensor, non_blocking=self._pinned)

    def take(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """See `Depot`."""
        with self._side.after_current():
            target.copy_(source, non_blocking=self._pinned)
        return self._side.mark()

    def add(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """See `Depot`. The host adds, once the copy has arrived."""
        arriving = self.empty(source.numel(), source.dtype)
        with self._side.after_current():
            arriving.copy_(source, non_blocking=self._pinned)
        return self._side.mark(lambda: target.add_(arriving))
