"""A save beside training: what is to be written is copied, and a thread writes the copy and commits it.

What users may change at any time (parameters, buffers) is copied before training goes on. What only a step changes, the
optimizer's state, which is most of it, the thread copies meanwhile; who is about to change it waits in `settle`.

The thread talks to those of the other ranks through an axis of its own, never through training's. It is no daemon: an
interpreter that ends waits for it. A process that is killed leaves what any killed save leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sheer import device as devices
from sheer.checkpoint.ranks import Axis, together
from sheer.checkpoint.saving import Begun, finish
from sheer.checkpoint.shard import Shard, nothing
from sheer.comm import Depot
from sheer.errors import CheckpointError
from sheer.observe import logger

_ALIGNMENT = 64  # bytes; no element is wider


class _Place(NamedTuple):
    """A shard and where its copy goes."""

    shard: Shard
    copy: Shard
    version: int
    """Of the shard's data when the place was made; writes raise it."""

    def fill(self) -> None:
        self.copy.data.copy_(self.shard.data.detach(), non_blocking=True)
        self.shard.rest(self.shard.data)
        self.copy.rest(self.copy.data)

    def check(self) -> None:
        """Raises CheckpointError where somebody has written to what was still to be copied."""
        if _version(self.shard.data) != self.version:
            raise CheckpointError(
                f"{self.shard.key} was written to while it was being copied. Before changing the optimizer's state by "
                "hand call engine.wait_for_checkpoint(), or use sheer.utils.safe_set_full_optimizer_state, which waits"
            )


def _version(tensor: torch.Tensor) -> int:
    """How often `tensor` was written to; one that was made in inference mode does not count it."""
    return 0 if tensor.is_inference() else tensor._version


class Snapshot:
    """Host memory that shards are copied to. It is kept, so that only the first copy pays for making it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def places(self, shards: Sequence[Shard], *, depot: Depot | None) -> list[_Place]:
        """Room for copies of `shards`, in memory of `depot` where one is given; the copies before are overwritten."""
        sizes = [-(-shard.data.nbytes // _ALIGNMENT) * _ALIGNMENT for shard in shards]
        if sum(sizes) > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # let go of it first
            if depot is None:
                self._memory = devices.host_memory(sum(sizes), near=[shard.data.device for shard in shards])
            else:
                self._memory = depot.empty(sum(sizes), torch.uint8)
        rest = nothing if depot is None else depot.rest
        places, at = [], 0
        for shard, size in zip(shards, sizes, strict=True):
            data = self._memory[at : at + shard.data.nbytes].view(shard.data.dtype)
            copy = Shard(shard.kind, shard.name, shard.shape, shard.start, data, rest)
            places.append(_Place(shard, copy, _version(shard.data)))
            at += size
        return places


def _fill(places: Sequence[_Place]) -> None:
    """Whole when this returns."""
    for place in places:
        place.fill()
    devices.synchronize({place.shard.data.device for place in places})


class Background:
    """At most one save at a time, on a thread of this rank. Start and end it from one thread."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._copies: list[Shard] = []
        self._later: list[_Place] = []
        self._settled = threading.Event()

    @property
    def running(self) -> bool:
        """Whether a save was started and not yet ended by `end`."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether `end` would not wait."""
        return self._thread is None or not self._thread.is_alive()

    def snapshot(self, shards: Sequence[Shard], *, later: Callable[[Shard], bool], depot: Depot | None = None) -> None:
        """Copy `shards` for `start`, into memory of `depot` where one is given; those that may be copied `later` are
        left to the thread."""
        assert not self.running, "the thread writes from this memory"
        places = self._snapshot.places(shards, depot=depot)
        _fill([place for place in places if not later(place.shard)])
        self._later = [place for place in places if later(place.shard)]
        self._copies = [place.copy for place in places]

    def start(self, begun: Begun, *, axis: Axis) -> None:
        """Finish `begun` with what `snapshot` took, beside what goes on here. `axis` is the thread's alone."""
        self._error = None
        self._settled.clear()
        thread = threading.Thread(target=self._work, args=(begun, axis), name="sheer checkpoint", daemon=False)
        thread.start()
        self._thread = thread

    def _work(self, begun: Begun, axis: Axis) -> None:
        try:
            together(axis, begun.doing, self._copy_later)
            finish(begun, self._copies, axis=axis)
        except BaseException as error:  # raised where the save is ended
            begun.close()
            self._error = CheckpointError(f"{begun.doing} beside training failed: {error}")
            self._error.__cause__ = error
            logger.error("%s", self._error)

    def _copy_later(self) -> None:
        try:
            _fill(self._later)
            for place in self._later:
                place.check()
        finally:
            self._later = []
            self._settled.set()

    def settle(self) -> None:
        """Wait until all has been copied; to be called before the optimizer's state is changed."""
        if self._thread is not None:
            self._settled.wait()

    def end(self) -> CheckpointError | None:
        """Wait for the save; what went wrong, None where it is committed or there was none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._copies = []
        error, self._error = self._error, None
        return error
