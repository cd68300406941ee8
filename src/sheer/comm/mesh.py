"""Joining and leaving the process group, and the axes in it."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from sheer import device as devices
from sheer.comm.axis import Axis
from sheer.errors import UsageError


def init_process_group(device: torch.device, *, timeout: float | None = None) -> bool:
    """Join the process group the launcher describes; True where this call made it.

    Without a launcher (no RANK and WORLD_SIZE in the environment) and without a group, nothing is made: one rank needs
    none. An existing group is used as it is.
    """
    if dist.is_initialized():
        return False
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not given:
        return False
    if len(given) == 1:
        missing = "RANK" if given == ["WORLD_SIZE"] else "WORLD_SIZE"
        raise UsageError(
            f"the environment has {given[0]}={os.environ[given[0]]} but no {missing}: start with "
            "`torchrun --nproc-per-node N script.py`, or unset it to run as one process"
        )
    dist.init_process_group(
        devices.backend(device), timeout=None if timeout is None else datetime.timedelta(seconds=timeout)
    )
    return True


def rank() -> int:
    """This process's rank of all, as the process group or else the launcher says; 0 alone."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def data_axis() -> Axis:
    """The axis of all ranks; one rank alone where there is no process group."""
    return Axis(dist.distributed_c10d._get_default_group() if dist.is_initialized() else None)


def destroy_process_group() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
