"""Making process groups beside the one of all ranks."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch.distributed as dist


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
