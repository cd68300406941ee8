"""Making process groups beside the one of all ranks, and breaking off."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

FAREWELL = 2**30
"""A tag that no message has."""


def own_group(
    peers: Sequence[tuple[int, ...]], *, like: dist.ProcessGroup, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Make a group of each of `peers`, ranks of the job, with the timeout of `like`; the one that this rank is in.

    Collective on the whole job, with equal arguments: every rank takes part in making every group, in one order. (torch
    can make one without the others only where all its members have made as many before.)
    """
    made = [dist.new_group(list(ranks), timeout=timeout_of(like), backend=backend) for ranks in peers]
    return next((group for group, ranks in zip(made, peers, strict=True) if dist.get_rank() in ranks), None)


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """How long its ranks wait for each other."""
    timeout: datetime.timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def break_off(group: dist.ProcessGroup) -> list[int]:
    """Close this rank's connections in `group`, so that whoever waits for it there fails at once. Not collective.

    Gives the ranks of the job whose connections had ended before. gloo closes all connections of a group when a receive
    times out, so one is posted that nobody answers. Another backend stays as it is and does not say whose: any, then.
    """
    peers = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    if dist.get_backend(group) != "gloo":
        return peers
    ended, open_works = [], []
    for peer in peers:
        try:
            open_works.append(dist.irecv(torch.empty(1), src=peer, group=group, tag=FAREWELL))
        except RuntimeError:
            ended.append(peer)
    for work in open_works[:1]:
        assert work is not None
        with suppress(RuntimeError):
            work.wait(datetime.timedelta(milliseconds=1))
    return ended
