"""Talk among the ranks of an axis beside training: through the store, so that a thread may do it."""

from __future__ import annotations

import datetime
import pickle
from typing import Any

import torch.distributed as dist
from torch.distributed import Store as _Store  # type: ignore[attr-defined]

from sheer.comm.agreement import raise_together
from sheer.comm.tickets import completing
from sheer.errors import CommError


class Beside:
    """The ranks of an axis, for one thread of each beside training. Uses no process group, whose collectives must come
    in one order; a connection to the store of its own, so that waiting here holds up nobody.

    Everything is collective among these threads. Rank 0 leaves an exchange last: where its process holds the store,
    nobody is left without an answer.
    """

    def __init__(self, store: _Store | None, *, rank: int, size: int, timeout: float) -> None:
        """`store` is this group of threads' own part of a store; a thread alone needs none."""
        self.rank, self.size = rank, size
        self._store, self._timeout = store, datetime.timedelta(seconds=timeout)
        self._calls = 0

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
        """What rank `of` told."""
        try:
            store.wait([key], self._timeout)
        except dist.DistStoreError as error:
            raise CommError(
                f"rank {self.rank} waited {self._timeout.total_seconds():g} s in vain for rank {of} of {self.size}"
            ) from error
        return bytes(store.get(key))

    def agree(self, error: BaseException | None, *, doing: str) -> None:
        """Raise one error on every rank if any rank brings one; the message lists them all, rank by rank."""
        raise_together(error, doing=doing, size=self.size, gather=self.gather_objects)

    def assemble(self, name: str, *, timeout: float) -> None:
        """Nothing: an exchange here waits for each rank by name anyway."""


def _tell(store: _Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # torch's annotation says str; both are taken
