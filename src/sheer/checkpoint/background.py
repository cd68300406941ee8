"""A save beside training: what is to be written is copied, and a thread writes the copy and commits it.

The thread talks to those of the other ranks through an axis of its own, never through training's. It is no daemon: an
interpreter that ends waits for it. A process that is killed leaves what any killed save leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from sheer import device as devices
from sheer.checkpoint.ranks import Axis
from sheer.checkpoint.saving import Begun, finish
from sheer.checkpoint.shard import Shard, nothing
from sheer.comm import Depot
from sheer.errors import CheckpointError
from sheer.observe import logger

_ALIGNMENT = 64  # bytes; no element is wider


class Snapshot:
    """Host memory that shards are copied to. It is kept, so that only the first copy pays for making it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, shards: Sequence[Shard], *, depot: Depot | None) -> list[Shard]:
        """Copies of `shards`, whole when this returns, in memory of `depot` where one is given; the ones before are
        overwritten."""
        sizes = [-(-shard.data.nbytes // _ALIGNMENT) * _ALIGNMENT for shard in shards]
        if sum(sizes) > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # let go of it first
            if depot is None:
                self._memory = devices.host_memory(sum(sizes), near=[shard.data.device for shard in shards])
            else:
                self._memory = depot.empty(sum(sizes), torch.uint8)
        rest = nothing if depot is None else depot.rest
        copies, at = [], 0
        for shard, size in zip(shards, sizes, strict=True):
            place = self._memory[at : at + shard.data.nbytes].view(shard.data.dtype)
            place.copy_(shard.data.detach(), non_blocking=True)
            copies.append(Shard(shard.kind, shard.name, shard.shape, shard.start, place, rest))
            shard.rest(shard.data)
            rest(place)
            at += size
        devices.synchronize({shard.data.device for shard in shards})
        return copies


class Background:
    """At most one save at a time, on a thread of this rank. Start and end it from one thread."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    @property
    def running(self) -> bool:
        """Whether a save was started and not yet ended by `end`."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether `end` would not wait."""
        return self._thread is None or not self._thread.is_alive()

    def snapshot(self, shards: Sequence[Shard], *, depot: Depot | None = None) -> list[Shard]:
        """Copies to give to `start`, in memory of `depot` where one is given."""
        assert not self.running, "the thread writes from this memory"
        return self._snapshot.take(shards, depot=depot)

    def start(self, begun: Begun, copies: Sequence[Shard], *, axis: Axis) -> None:
        """Finish `begun` beside what goes on here. `axis` is the thread's alone."""

        def work() -> None:
            try:
                finish(begun, copies, axis=axis)
            except BaseException as error:  # raised where the save is ended
                self._error = CheckpointError(f"{begun.doing} beside training failed: {error}")
                self._error.__cause__ = error
                logger.error("%s", self._error)

        self._error = None
        self._thread = threading.Thread(target=work, name="sheer checkpoint", daemon=False)
        self._thread.start()

    def end(self) -> CheckpointError | None:
        """Wait for the save; what went wrong, None where it is committed or there was none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error
