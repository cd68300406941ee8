"""Talk among the ranks of an axis beside training: through the store, so that a thread may do it."""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import Store as _Store  # type: ignore[attr-defined]

from sheer.comm.agreement import raise_together
from sheer.comm.tickets import completing
from sheer.errors import CommError

POLL_S = 0.02
PULSE_S = 2.0
SILENCE_S = 30.0
"""A rank that has given no sign of life for so long is gone; one that only takes long gives them."""


class Beside:
    """The ranks of an axis, for one thread of each beside training. Uses no process group, whose collectives must come
    in one order; a connection to the store of its own, so that waiting here holds up nobody.

    Everything is collective among these threads. Rank 0 leaves an exchange last: where its process holds the store,
    nobody is left without an answer. While this object lives its process gives signs of life, so that the others need
    not wait for one that was killed.
    """

    def __init__(
        self, store: _Store | None, *, rank: int, size: int, timeout: float, silence: float = SILENCE_S
    ) -> None:
        """`store` is this group of threads' own part of a store; a thread alone needs none."""
        self.rank, self.size = rank, size
        self._store, self._timeout, self._silence = store, timeout, silence
        self._pulse = min(PULSE_S, silence / 4)
        self._calls = 0
        if store is not None:
            stop = threading.Event()
            weakref.finalize(self, stop.set)
            threading.Thread(target=_beat, args=(store, f"alive/{rank}", self._pulse, stop), daemon=True).start()

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        if self._store is None:
            return [value]
        self._calls += 1
        with completing("an exchange through the store"):
            return self._exchange(self._store, str(self._calls), value)

    def _exchange(self, store: _Store, call: str, value: Any) -> list[Any]:
        """By rank 0, which takes what it told out of the store again once all have it."""
        if self.rank:
            _tell(store, f"{call}/from/{self.rank}", pickle.dumps(value))
            told: list[Any] = pickle.loads(self._hear(store, f"{call}/told", of=0))
            _tell(store, f"{call}/taken/{self.rank}", b"")
            return told
        others = range(1, self.size)
        told = [value, *(pickle.loads(self._hear(store, f"{call}/from/{rank}", of=rank)) for rank in others)]
        _tell(store, f"{call}/told", pickle.dumps(told))
        for rank in others:
            self._hear(store, f"{call}/taken/{rank}", of=rank)
        for key in (f"{call}/told", *(f"{call}/{what}/{rank}" for rank in others for what in ("from", "taken"))):
            store.delete_key(key)
        return told

    def _hear(self, store: _Store, key: str, *, of: int) -> bytes:
        """What rank `of` told. Raises CommError where it is gone, or does not speak in time."""
        began = heard = looked = time.monotonic()
        sign = b""
        while not store.check([key]):
            time.sleep(POLL_S)
            now = time.monotonic()
            if now - began > self._timeout:
                raise CommError(f"rank {self.rank} waited {self._timeout:g} s in vain for rank {of} of {self.size}")
            if now - looked < self._pulse:
                continue
            looked = now
            if (last := _sign(store, of)) != sign:
                heard, sign = now, last
            elif now - heard > self._silence:
                raise CommError(f"rank {of} of {self.size} has given no sign of life for {self._silence:g} s")
        return bytes(store.get(key))

    def agree(self, error: BaseException | None, *, doing: str) -> None:
        """Raise one error on every rank if any rank brings one; the message lists them all, rank by rank."""
        raise_together(error, doing=doing, size=self.size, gather=self.gather_objects)

    def assemble(self, name: str, *, timeout: float) -> None:
        """Nothing: an exchange here waits for each rank by name anyway."""


def _tell(store: _Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # torch's annotation says str; both are taken


def _beat(store: _Store, key: str, pulse: float, stop: threading.Event) -> None:
    """Say again and again that this process lives."""
    count = 0
    try:
        while not stop.is_set():
            _tell(store, key, str(count).encode())
            count += 1
            stop.wait(pulse)
        store.delete_key(key)
    except dist.DistError:  # the store is gone; who needs it is told when asking
        return


def _sign(store: _Store, rank: int) -> bytes:
    """The last sign of life of `rank`; empty where there was none."""
    key = f"alive/{rank}"
    return bytes(store.get(key)) if store.check([key]) else b""
