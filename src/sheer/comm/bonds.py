"""What binds this rank to the others, and how ranks find out together who is gone when an operation fails.

A backend tells a rank at most that the peer which it waits for is gone. One that waits for a survivor would go on until
its group times out, for that survivor has stopped. So a rank whose operation has failed says that it lives, then breaks
off all its connections: whoever waits for it fails too and does the same, and so on. Gone is whose connection has ended
without such a word.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore as _PrefixStore  # type: ignore[attr-defined]

from sheer.comm.groups import break_off, timeout_of

PATIENCE = 5.0
"""Seconds that a rank whose operation has failed waits for the others to fail too. At most half a group's timeout."""

POLL_S = 0.05


class Loss(NamedTuple):
    """What a rank that has lost a peer finds out."""

    first: str
    """What the first that noticed said; empty where it was this rank, or nobody knows."""
    missing: tuple[int, ...]
    """Whose connection has ended, or may have, without a word."""
    patience: float
    """Seconds that were waited for a word."""


class Bonds:
    """The groups in which others may wait for this rank: shared by all axes and links of its job."""

    def __init__(self, home: dist.ProcessGroup | None) -> None:
        """`home` has all ranks of the job. What is missing is named by its rank there."""
        self._ranks = [0] if home is None else dist.get_process_group_ranks(home)
        self._home = home
        self._groups = [] if home is None else [home]
        self._loss: Loss | None = None
        self.key = ""
        """Where in the store the ranks of this job talk; equal on all of them."""

    def add(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Others may wait for this rank there too."""
        self._groups += groups

    def discard(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """This rank leaves them."""
        left = [*groups]
        self._groups = [group for group in self._groups if group not in left]

    def absent(self) -> str:
        """A sentence that names the ranks which have not failed as this one has: who is gone, or does something else.
        Every rank whose operation fails answers here, once, and waits a moment for the others."""
        loss = self.lost("")
        who = ", ".join(map(str, loss.missing))
        if not who:
            return ""
        return f"Of {len(self._ranks)} ranks, {who} did not fail too within {loss.patience:g} s: look there. "

    def lost(self, said: str) -> Loss:
        """An operation of this rank has failed: break off with all others, and find out who is gone. Not collective.
        What the first of all ranks said, the others hear."""
        if self._loss is None:
            self._loss = Loss("", (), 0) if self._home is None else self._find_out(self._home, said)
        return self._loss

    def _find_out(self, home: dist.ProcessGroup, said: str) -> Loss:
        own = self._ranks.index(dist.get_rank())
        mine = f"rank {own}: {said}" if said else f"rank {own}"
        patience = min(PATIENCE, timeout_of(home).total_seconds() / 2)
        store = _PrefixStore(f"sheer/{self.key}/lost", dist.distributed_c10d._get_default_store())
        first = mine
        try:
            first = store.compare_set("first", "", mine).decode()
            store.set(f"{own}", "here")
        except RuntimeError:  # DistError among them: the process that keeps the store is gone
            pass
        gone = {rank for group in self._groups for rank in break_off(group)}
        missing = self._silent(store, [self._ranks.index(rank) for rank in sorted(gone)], patience)
        return Loss("" if first == mine else first, missing, patience)

    def _silent(self, store: _PrefixStore, suspects: list[int], patience: float) -> tuple[int, ...]:
        """Which of `suspects` do not say within so many seconds that they live."""
        longer = patience / 4 if self._ranks[0] == dist.get_rank() else 0  # it may keep the store: it leaves last
        deadline = time.monotonic() + patience + longer
        try:
            while True:
                suspects = [rank for rank in suspects if not store.check([f"{rank}"])]
                if not suspects or time.monotonic() > deadline:
                    return tuple(suspects)
                time.sleep(POLL_S)
        except RuntimeError:  # the store is gone, and where no launcher keeps it that is rank 0's
            return (0,) if 0 in suspects else tuple(suspects)
