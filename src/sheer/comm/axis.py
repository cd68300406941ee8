"""The ranks that share a kind of work, and how they talk about it."""

from __future__ import annotations

import datetime
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore as _PrefixStore  # type: ignore[attr-defined]
from torch.distributed import Store as _Store  # type: ignore[attr-defined]

from sheer.comm.agreement import raise_together
from sheer.comm.beside import Beside
from sheer.comm.bonds import Bonds
from sheer.comm.groups import timeout_of
from sheer.comm.tickets import completing
from sheer.errors import CommError

T = TypeVar("T")


class Axis:
    """One axis of the mesh: the ranks that share a kind of work, and how they talk about it.

    Everything here is collective on the axis. Control messages are small Python objects; tensors go through a `Lane`.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, name: str = "data", bonds: Bonds | None = None) -> None:
        """`bonds` are those of the axis of all ranks of the job; by default this is that axis."""
        self.group = group
        self.name = name
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.bonds = Bonds(group) if bonds is None else bonds
        """For when an operation here fails."""
        self.absent = self.bonds.absent
        self._calls: dict[str, int] = defaultdict(int)
        self._id: str = self.broadcast_object(uuid.uuid4().hex)
        if bonds is None:
            self.bonds.key = self._id
        elif group is not None:
            bonds.add([group])

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        with completing("a message from rank 0", self.absent):
            dist.broadcast_object_list(box, group_src=0, group=self.group)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with completing("an exchange of messages", self.absent):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Overwrite `tensor` with that of rank `source`."""
        if self.size > 1 and tensor.numel():
            with completing(f"a broadcast from rank {source}", self.absent):
                dist.broadcast(tensor, group_src=source, group=self.group)

    def agree(self, error: BaseException | None, *, doing: str) -> None:
        """Raise one error on every rank if any rank brings one; the message lists them all, rank by rank."""
        raise_together(error, doing=doing, size=self.size, gather=self.gather_objects)

    def together(self, work: Callable[[], T], *, doing: str) -> T:
        """Run `work` on every rank and give its result; where it failed on any rank, raise on all."""
        error: BaseException | None = None
        results: list[T] = []
        try:
            results.append(work())
        except Exception as failure:
            error = failure
        self.agree(error, doing=doing)
        return results[0]

    def assemble(self, name: str, *, timeout: float) -> None:
        """Wait until every rank has come here; after `timeout` seconds an error names the ranks that have not.

        Goes through the store, not through a collective, so that a rank which waits in vain has sent nothing that
        could be mistaken for part of another operation: it can go on.
        """
        if self.size == 1:
            return
        store = _PrefixStore(f"sheer/{self._id}/{name}", dist.distributed_c10d._get_default_store())
        call = self._calls[name]
        while store.check([f"{call}/verdict"]) and store.get(f"{call}/verdict") == b"given up":
            call += 1  # the others gave up on an earlier call that this rank never made
        self._calls[name] = call + 1
        store.set(f"{call}/{self.rank}", "here")
        missing = self._wait_for_all(store, call, timeout)
        verdict = store.compare_set(f"{call}/verdict", "", "given up" if missing else "complete")
        if verdict == b"given up":
            who = ", ".join(map(str, missing)) or "another rank that gave up waiting"
            raise CommError(
                f"{name}: rank {self.rank} waited {timeout:g} s in vain for rank(s) {who} of {self.size}. "
                "Every rank must make this call; if only one may write, that is decided inside."
            )

    def _wait_for_all(self, store: _Store, call: int, timeout: float) -> list[int]:
        deadline = time.monotonic() + timeout
        missing = []
        for rank in range(self.size):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                store.wait([f"{call}/{rank}"], datetime.timedelta(seconds=left))
            except dist.DistStoreError:
                missing.append(rank)
        return missing

    def beside(self) -> Beside:
        """These ranks for one thread of each beside this one. Not collective, but every rank must ask equally often."""
        if self.group is None or self.size == 1:
            return Beside(None, rank=0, size=1, timeout=0)
        self._calls["beside"] += 1
        prefix = f"sheer/{self._id}/beside/{self._calls['beside']}"
        connection = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        store = _PrefixStore(prefix, connection)
        return Beside(store, rank=self.rank, size=self.size, timeout=timeout_of(self.group).total_seconds())

    def barrier(self) -> None:
        """Wait for all ranks of the axis."""
        if self.size > 1:
            with completing("a barrier", self.absent):
                dist.barrier(group=self.group)
