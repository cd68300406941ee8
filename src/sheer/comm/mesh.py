"""Joining and leaving the process group, and the axes of the mesh in it.

W ranks are S pipeline stages times D data-parallel ranks: rank = stage * D + data rank, so that the ranks of one stage,
which talk most, are neighbours.
"""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sheer import device as devices
from sheer.comm.axis import Axis
from sheer.comm.groups import own_group
from sheer.errors import UsageError


def init_process_group(device: torch.device, *, timeout: float | None = None) -> None:
    """Join the process group the launcher describes, for the life of this process: a launcher's store serves one group.

    Without a launcher (no RANK and WORLD_SIZE in the environment) and without a group, nothing is made: one rank needs
    none. An existing group is used as it is.
    """
    if dist.is_initialized():
        return
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not given:
        return
    if len(given) == 1:
        missing = "RANK" if given == ["WORLD_SIZE"] else "WORLD_SIZE"
        raise UsageError(
            f"the environment has {given[0]}={os.environ[given[0]]} but no {missing}: start with "
            "`torchrun --nproc-per-node N script.py`, or unset it to run as one process"
        )
    dist.init_process_group(
        devices.backend(device), timeout=None if timeout is None else datetime.timedelta(seconds=timeout)
    )
    atexit.register(destroy_process_group)


def is_initialized() -> bool:
    """Whether this process has joined a process group."""
    return dist.is_initialized()


def rank() -> int:
    """This process's rank of all, as the process group or else the launcher says; 0 alone."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes there are, as the process group or else the launcher says; 1 alone."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def data_axis() -> Axis:
    """The axis of all ranks; one rank alone where there is no process group."""
    return Axis(dist.distributed_c10d._get_default_group() if dist.is_initialized() else None)


def destroy_process_group() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class Mesh:
    """The axes of a run. With one stage `data` is `world` itself and `pipe` has one rank."""

    world: Axis
    """All ranks."""
    data: Axis
    """The ranks of this stage, which hold the same parameters and see different samples."""
    pipe: Axis
    """The ranks with this data rank, one per stage, in order of stages."""
    ties: Mapping[tuple[int, ...], Axis]
    """Stages that share a parameter, this one among them -> their ranks with this data rank."""
    made: tuple[dist.ProcessGroup, ...] = ()
    """The groups that were made for it."""

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pipe.size

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.pipe.rank

    def close(self) -> None:
        """Leave the groups that were made for this mesh. All ranks do."""
        self.world.bonds.discard(self.made)
        for group in self.made:
            if dist.is_initialized():
                dist.destroy_process_group(group)


def build_mesh(world: Axis, *, stages: int = 1, ties: Collection[tuple[int, ...]] = ()) -> Mesh:
    """The mesh of `stages` stages over `world`; `ties` are the sets of stages that share a parameter.

    Collective on `world`, the ranks of the whole job, with equal arguments.
    """
    if stages == 1:
        return Mesh(world, world, Axis(None, name="pipe"), {})
    if world.size % stages:
        raise UsageError(
            f"{stages} pipeline stages cannot share {world.size} ranks equally; start a multiple of {stages} processes"
        )
    home = world.group
    assert home is not None
    width = world.size // stages
    stage = world.rank // width
    made: list[dist.ProcessGroup] = []

    def axis(name: str, groups: Sequence[Sequence[int]]) -> Axis:
        peers = [tuple(dist.get_global_rank(home, member) for member in ranks) for ranks in groups if len(ranks) > 1]
        own = own_group(peers, like=home)
        if own is not None:
            made.append(own)
        return Axis(own, name=name, bonds=world.bonds)

    rows = [range(s * width, (s + 1) * width) for s in range(stages)]
    data = axis("data", rows)
    pipe = axis("pipe", [range(c, world.size, width) for c in range(width)])
    tied = {
        holders: axis(f"tie {holders}", [[s * width + c for s in holders] for c in range(width)])
        for holders in sorted(set(ties))
    }
    return Mesh(world, data, pipe, {holders: one for holders, one in tied.items() if stage in holders}, tuple(made))
