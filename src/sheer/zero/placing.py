"""A layout's parameters in memory: replicated, or sharded with what gathers them. Decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from sheer.comm import Axis, Depots, DeviceMemory, Lane, Ticket, Vault
from sheer.layout import ALIGNMENT, STAGES, Bucket, BucketKey, Layout, Slot, align
from sheer.zero.flat import FlatBucket, ReplicatedFlat, ShardedFlat, Source
from sheer.zero.gathering import Gathering
from sheer.zero.marks import built_place_of, unmark_built
from sheer.zero.units import ROOT, Units


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


class Wholes:
    """Whole values out of sharded buckets, those of one unit at a time. A `Source`; collective."""

    def __init__(self, placed: Placed, lane: Lane) -> None:
        self._placed = placed
        self._lane = lane
        self._here: dict[ShardedFlat, Ticket] = {}

    def __call__(self, slot: Slot, param: torch.nn.Parameter) -> torch.Tensor:
        """The value of `param`, flat; a view that the next call may free."""
        home = self._placed.home(param)
        assert home is not None, slot.fqn
        assert isinstance(home.flat, ShardedFlat)
        flat = home.flat
        if flat not in self._here:
            if any(other.plan.key.unit != flat.plan.key.unit for other in self._here):
                self.close()
            self._here[flat] = flat.refill(self._lane)
            self._here[flat].wait()
        place = flat.plan.slots[home.position]
        return flat.full[place.start : place.stop]

    def close(self) -> None:
        """Free what is whole."""
        for flat, ticket in self._here.items():
            flat.hide(ticket)
        self._here = {}


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
    ahead: bool,
) -> Placed:
    """Move `params` into the buckets of `layout`. Collective on `axis`: every rank gets rank 0's values, or those that
    `source` gives where parameters are sharded; what `Init` has built comes from its shards."""
    buckets = [(bucket, [params[slot.fqn] for slot in bucket.slots]) for bucket in layout.buckets]
    vault = Vault(device)
    if not layout.shards_params:
        for param in params.values():
            make_whole(param)
        replicated = tuple(
            ReplicatedFlat(bucket, own, layout=layout, axis=axis, device=device, depots=depots)
            for bucket, own in buckets
        )
        return Placed(
            axis,
            replicated,
            Gathering((), (), chunks=(), ahead=False, axis=axis, lane=lane, vault=vault),
            _homes(replicated),
        )

    def of_rank_0(slot: Slot, param: torch.nn.Parameter) -> torch.Tensor:
        if (built := built_place_of(param)) is not None:
            for flat in built.flats:
                flat.adopt()
            value = built.whole_value(slot, param)
            unmark_built(param)  # and with it goes its shard
            return value
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
    gathering = Gathering(sharded, units.order, chunks=units.chunks, ahead=ahead, axis=axis, lane=lane, vault=vault)
    return Placed(axis, sharded, gathering, _homes(sharded))


def make_whole(param: torch.nn.Parameter) -> None:
    """Undo what `Init` has done to `param`, if it has. Collective."""
    built = built_place_of(param)
    home = None if built is None else built.home(param)
    if built is not None and home is not None:
        unmark_built(param)
        home.flat.adopt()
        home.flat.release(built.axis)


class Site(NamedTuple):
    """Where parameters are sharded one by one, before there is a layout."""

    axis: Axis
    lane: Lane
    vault: Vault
    device: torch.device
    dtype: torch.dtype | None
    """What floating-point parameters become; None leaves them."""


def shard_alone(param: torch.nn.Parameter, name: str, site: Site) -> Placed:
    """Leave `param` sharded, as rank 0 has it, in a bucket of its own that no optimizer knows. Collective."""
    axis, dtype = site.axis, site.dtype or param.dtype
    value = param.detach().to(site.device).contiguous()
    axis.broadcast(value)
    slot = Slot(name, tuple(param.shape), 0, param.numel())
    key = BucketKey(dtype, dtype, None)
    bucket = Bucket(0, key, (slot,), align(slot.numel, ALIGNMENT * axis.size), world=axis.size)
    memory = DeviceMemory(site.device)
    flat = ShardedFlat(
        bucket,
        [param],
        layout=Layout(STAGES[3], axis.size, (bucket,)),
        rank=axis.rank,
        source=lambda _slot, _param: value.reshape(-1),
        device=site.device,
        vault=site.vault,
        depots=Depots(memory, memory, memory),
    )
    gathering = Gathering((flat,), (ROOT,), chunks=(), ahead=False, axis=axis, lane=site.lane, vault=site.vault)
    return Placed(axis, (flat,), gathering, _homes([flat]))


def _homes(flats: Sequence[FlatBucket]) -> dict[int, Home]:
    return {id(param): Home(flat, position) for flat in flats for position, param in enumerate(flat.params)}
