"""A layout's parameters in memory: replicated, or sharded with what gathers them. Decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from sheer.comm import Axis, Depots, Lane, Vault
from sheer.layout import Layout, Slot
from sheer.zero.flat import FlatBucket, ReplicatedFlat, ShardedFlat, Source
from sheer.zero.gathering import Gathering
from sheer.zero.units import Units


class Home(NamedTuple):
    """Where one parameter lives."""

    flat: FlatBucket
    position: int
    """Among the bucket's parameters."""


class Placed(NamedTuple):
    """The parameters of a layout in memory."""

    axis: Axis
    flats: tuple[FlatBucket, ...]
    """In plan order."""
    gathering: Gathering
    homes: Mapping[int, Home]
    """By the parameter's id, which is its own while a bucket holds it."""

    def home(self, param: torch.Tensor) -> Home | None:
        """Where `param` lives; None if it is not one of these."""
        return self.homes.get(id(param))

    def whole_value(self, slot: Slot, param: torch.nn.Parameter) -> torch.Tensor:
        """The value of `param`, flat, put together from all ranks. Collective where parameters are sharded."""
        home = self.home(param)
        assert home is not None, slot.fqn
        return home.flat.whole_value(home.position, self.axis).reshape(-1)


def place(
    layout: Layout,
    params: Mapping[str, torch.nn.Parameter],
    *,
    units: Units,
    source: Source | None,
    lane: Lane,
    axis: Axis,
    device: torch.device,
    depots: Depots,
) -> Placed:
    """Move `params` into the buckets of `layout`. Collective on `axis`: every rank gets rank 0's values, or those that
    `source` gives where parameters are sharded."""
    buckets = [(bucket, [params[slot.fqn] for slot in bucket.slots]) for bucket in layout.buckets]
    vault = Vault(device)
    if not layout.shards_params:
        replicated = tuple(
            ReplicatedFlat(bucket, own, layout=layout, axis=axis, device=device, depots=depots)
            for bucket, own in buckets
        )
        return Placed(
            axis, replicated, Gathering((), (), chunks=(), axis=axis, lane=lane, vault=vault), _homes(replicated)
        )

    def of_rank_0(_slot: Slot, param: torch.nn.Parameter) -> torch.Tensor:
        value = param.detach().contiguous()
        axis.broadcast(value)
        return value.reshape(-1)

    sharded = tuple(
        ShardedFlat(
            bucket,
            own,
            layout=layout,
            rank=axis.rank,
            source=source or of_rank_0,
            device=device,
            vault=vault,
            depots=depots,
        )
        for bucket, own in buckets
    )
    gathering = Gathering(sharded, units.order, chunks=units.chunks, axis=axis, lane=lane, vault=vault)
    return Placed(axis, sharded, gathering, _homes(sharded))


def _homes(flats: Sequence[FlatBucket]) -> dict[int, Home]:
    return {id(param): Home(flat, position) for flat in flats for position, param in enumerate(flat.params)}
