"""Where each piece of each parameter lives: pure plans, no tensors, no process group.

Three things have a placement on the data-parallel axis: the parameter at rest between steps, the gradient accumulator
between micro-batches, and the optimizer state with the parameter it updates. A ZeRO stage is one row of that table
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054); the
collectives follow from the changes of placement.

A bucket is a flat buffer of parameters that share dtype, gradient dtype, trainability and optimizer group, the chunk of
a pipeline's stage, and, where parameters are sharded, the unit that they are gathered with. Buckets are in reverse
order of use, which is the order in which their gradients become ready and the order in which every rank communicates
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch

ALIGNMENT = 128
"""Parameter starts and shard lengths are multiples of this many elements (256 bytes in the narrowest dtype), so that
inductor, cuBLAS and flat kernels always see aligned memory."""

LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})
"""Parameters of these are updated in fp32."""

MAX_BUCKET_NUMEL = 2**30
"""Flat kernels index with 32 bits; a bucket stays well below unless one tensor alone is larger."""


class Placement(Enum):
    """How one tensor is spread over an axis."""

    REPLICATED = "R"
    """Every rank holds all of it."""
    SHARDED = "S"
    """Every rank holds its own interval."""
    PARTIAL = "P"
    """Every rank holds a summand of all of it."""


class Collective(Enum):
    """What takes a tensor from one placement to another."""

    NOTHING = "nothing"
    """The placements are equal."""
    ALL_REDUCE = "all_reduce"
    """P -> R: sum, everywhere."""
    REDUCE_SCATTER = "reduce_scatter"
    """P -> S: sum, each rank its interval."""
    ALL_GATHER = "all_gather"
    """S -> R: every rank's interval, everywhere."""
    SLICE = "slice"
    """R -> S: keep the own interval; no communication."""


_R, _S, _P = Placement.REPLICATED, Placement.SHARDED, Placement.PARTIAL
_CHANGES: Mapping[tuple[Placement, Placement], Collective] = MappingProxyType(
    {
        (_R, _R): Collective.NOTHING,
        (_S, _S): Collective.NOTHING,
        (_P, _P): Collective.NOTHING,
        (_P, _R): Collective.ALL_REDUCE,
        (_P, _S): Collective.REDUCE_SCATTER,
        (_S, _R): Collective.ALL_GATHER,
        (_R, _S): Collective.SLICE,
    }
)


def change(source: Placement, target: Placement) -> Collective:
    """The collective that turns `source` into `target`; nothing becomes PARTIAL again."""
    return _CHANGES[source, target]


class Stage(NamedTuple):
    """One row of the placement table."""

    param: Placement
    grad: Placement
    optim: Placement


STAGES: Mapping[int, Stage] = MappingProxyType(
    {
        0: Stage(param=_R, grad=_P, optim=_R),
        1: Stage(param=_R, grad=_P, optim=_S),
        2: Stage(param=_R, grad=_S, optim=_S),
        3: Stage(param=_S, grad=_S, optim=_S),
    }
)


class Place(Enum):
    """What memory something rests in between its uses."""

    DEVICE = "device"
    """The memory of the device that trains."""
    HOST = "host"
    """The machine's own memory, where the optimizer then works."""
    FILES = "files"
    """Files on a local disk, mapped into the machine's memory where they are worked on."""


class Places(NamedTuple):
    """The last column of the placement table, for each of the three that it places."""

    param: Place = Place.DEVICE
    """Of sharded parameters at rest; what computes is on the device."""
    grad: Place = Place.DEVICE
    """Of the reduced gradient, where it is sharded; autograd accumulates on the device."""
    optim: Place = Place.DEVICE
    """Of the masters and the optimizer's state, which are updated where they are."""


ON_DEVICE = Places()


def places(stage: Stage, *, param: Place, optim: Place) -> Places:
    """Where things rest: as asked, and sharded gradients on the host where the optimizer works there."""
    away = optim is not Place.DEVICE and stage.grad is Placement.SHARDED
    return Places(param, Place.HOST if away else Place.DEVICE, optim)


class ParamSpec(NamedTuple):
    """What the plan must know of one parameter."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype it computes in."""
    grad_dtype: torch.dtype
    """The dtype its gradient is accumulated in."""
    group: int | None
    """Index of its optimizer group; None when it is frozen or in no group, so that nothing updates it."""
    tie: tuple[int, ...] = ()
    """The pipeline stages that hold it, where it is more than one."""
    unit: str = ""
    """What it is gathered with, where parameters are sharded: the name of a block, or "" for the rest of the model."""
    chunk: int | None = None
    """The chunk of a pipeline's stage that alone uses it, where the stage has several; its gradient is complete with
    that chunk's backward."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class BucketKey(NamedTuple):
    """Parameters share a bucket only where all of this is equal."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    group: int | None
    tie: tuple[int, ...] = ()
    unit: str = ""
    chunk: int | None = None


class Slot(NamedTuple):
    """One parameter's place in a bucket: elements [start, start + numel)."""

    fqn: str
    shape: tuple[int, ...]
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """One past its last element in the bucket."""
        return self.start + self.numel


class Interval(NamedTuple):
    """Elements [start, stop) of something flat."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements; never negative."""
        return self.stop - self.start


class Piece(NamedTuple):
    """Elements [start, stop) of the row-major flattened parameter `fqn`, found at `offset` of bucket `bucket`."""

    fqn: str
    shape: tuple[int, ...]
    start: int
    stop: int
    bucket: int
    offset: int


class Split(NamedTuple):
    """What of a model is held here, as names go. A plain model is a split into one stage."""

    stages: int = 1
    stage: int = 0
    canonical: Mapping[str, str] = MappingProxyType({})
    """Local name -> the parameter's own name, where they differ: at the later places of a tied parameter."""
    tied: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """Own name -> the stages that hold it, in order, where it is more than one. The first one counts and saves it."""
    chunks: int = 1
    """How many pieces of the model are here, each with forwards and backwards of its own."""
    chunk_of: Mapping[str, int] = MappingProxyType({})
    """Local name of a parameter -> the one chunk that uses it, where there are several."""
    calls: tuple[str, ...] | None = None
    """The modules that a stage calls one by one and that alone read their parameters; None for a plain model."""


def overlap(a: Interval, b: Interval) -> Interval | None:
    """The elements that both hold; None where there are none."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Interval(start, stop) if start < stop else None


@dataclass(frozen=True)
class Bucket:
    """A flat buffer of `numel` elements, padded so that `world` equal, aligned shards tile it."""

    index: int
    key: BucketKey
    slots: tuple[Slot, ...]
    numel: int
    world: int

    @property
    def trainable(self) -> bool:
        """Whether an optimizer updates it; only then has it a gradient buffer."""
        return self.key.group is not None

    def shard(self, rank: int) -> Interval:
        """The interval of this bucket that `rank` owns where something is sharded."""
        length = self.numel // self.world
        return Interval(rank * length, (rank + 1) * length)

    def pieces(self, interval: Interval) -> Iterator[Piece]:
        """The parts of parameters inside `interval`, in order. A zero-element parameter counts where it stands."""
        for slot in self.slots:
            start, stop = max(slot.start, interval.start), min(slot.stop, interval.stop)
            home = min(slot.start, self.numel - 1)  # a last one without elements starts where the bucket ends
            if start < stop or (slot.numel == 0 and interval.start <= home < interval.stop):
                yield Piece(slot.fqn, slot.shape, start - slot.start, max(start, stop) - slot.start, self.index, start)


@dataclass(frozen=True)
class Layout:
    """The buckets of a model on one data-parallel axis, in launch order, and the placements they go through."""

    stage: Stage
    world: int
    buckets: tuple[Bucket, ...]
    places: Places = ON_DEVICE

    def owned(self, bucket: Bucket, rank: int) -> Interval:
        """What `rank` updates of `bucket`: all of it where the optimizer is replicated, else its shard."""
        if self.stage.optim is Placement.REPLICATED:
            return Interval(0, bucket.numel)
        return bucket.shard(rank)

    @property
    def shards_params(self) -> bool:
        """Whether no rank has whole parameters at rest on its device, so that they are gathered before use."""
        elsewhere = self.world > 1 or self.places.param is not Place.DEVICE
        return self.stage.param is Placement.SHARDED and elsewhere

    def has_master(self, bucket: Bucket) -> bool:
        """Whether what the optimizer updates of `bucket` is a tensor of its own: in fp32 beside low-precision
        parameters, and where parameters rest in another place."""
        at = self.places.param if self.shards_params else Place.DEVICE
        return bucket.trainable and (bucket.key.dtype in LOW_PRECISION or at is not self.places.optim)

    def master_dtype(self, bucket: Bucket) -> torch.dtype:
        """What the optimizer updates `bucket` in."""
        return torch.float32 if bucket.key.dtype in LOW_PRECISION else bucket.key.dtype

    def nbytes(self) -> dict[str, tuple[Place, int]]:
        """The bytes that one rank keeps between steps, and where: of parameters, gradients, and masters besides them.
        The optimizer's state is where the masters are; how much it is only the optimizer knows."""
        share = {_R: 1, _P: 1, _S: self.world}
        param = grad = master = 0
        for bucket in self.buckets:
            param += bucket.numel * bucket.key.dtype.itemsize // (share[self.stage.param] if self.shards_params else 1)
            if bucket.trainable:
                grad += bucket.numel * bucket.key.grad_dtype.itemsize // share[self.stage.grad]
            if self.has_master(bucket):
                master += bucket.numel * self.master_dtype(bucket).itemsize // share[self.stage.optim]
        at = self.places.param if self.shards_params else Place.DEVICE
        return {"param": (at, param), "grad": (self.places.grad, grad), "master": (self.places.optim, master)}

    def digest(self) -> str:
        """A short fingerprint; equal on all ranks of a healthy run."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        row = "param {} grad {} optim {}".format(*(placement.value for placement in self.stage))
        lines = [f"{row} over {self.world} ranks, {len(self.buckets)} buckets"]
        kept = [f"{what} {nbytes / 1e6:,.1f} MB {at.value}" for what, (at, nbytes) in self.nbytes().items()]
        lines.append(f"a rank keeps {', '.join(kept)} (and the optimizer's state there)")
        for bucket in self.buckets:
            dtype = str(bucket.key.dtype).removeprefix("torch.")
            group = "frozen" if bucket.key.group is None else f"group {bucket.key.group}"
            names = f"{bucket.slots[0].fqn} .. {bucket.slots[-1].fqn}"
            if bucket.key.unit:
                names += f"  (unit {bucket.key.unit})"
            lines.append(
                f"  {bucket.index:4d}  {bucket.numel:>12,d} {dtype:9s} {group:8s} {len(bucket.slots):5d}  {names}"
            )
        return "\n".join(lines)


def align(numel: int, multiple: int = ALIGNMENT) -> int:
    """`numel` rounded up to a multiple."""
    return -(-numel // multiple) * multiple


def bucket_limit(total_numel: int, upper: int) -> int:
    """How many elements a bucket may hold: about an eighth of the model, so that communication overlaps the backward,
    but no less than a million (small messages are latency), no more than 40 million, and never more than `upper`."""
    return max(1, min(max(total_numel // 8, 2**20), 40 * 10**6, upper, MAX_BUCKET_NUMEL))


def plan(params: Sequence[ParamSpec], *, stage: Stage, world: int, limit: int, places: Places = ON_DEVICE) -> Layout:
    """Place `params` (in order of use) into buckets of at most `limit` elements, in reverse order of use.

    A parameter larger than `limit` has a bucket of its own. Pure and deterministic: every rank that passes the same
    arguments gets the same layout. Buckets of parameters that several pipeline stages hold depend on nothing else, so
    that all of these stages cut them alike.
    """
    filling: dict[BucketKey, list[ParamSpec]] = {}
    sizes: dict[BucketKey, int] = {}
    closed: list[tuple[BucketKey, list[ParamSpec]]] = []
    tied = sorted((spec for spec in params if spec.tie), key=lambda spec: spec.fqn)
    for spec in [*tied, *(spec for spec in reversed(params) if not spec.tie)]:
        key = BucketKey(spec.dtype, spec.grad_dtype, spec.group, spec.tie, spec.unit, spec.chunk)
        size = align(spec.numel)
        if key in filling and sizes[key] + size > (MAX_BUCKET_NUMEL if key.tie else limit):
            closed.append((key, filling.pop(key)))
        if key not in filling:
            filling[key], sizes[key] = [], 0
        filling[key].append(spec)
        sizes[key] += size
    order = {spec.fqn: position for position, spec in enumerate(reversed(params))}
    closed.extend(filling.items())
    # What is in no unit is used all over the model, so its gradients are complete last.
    split = any(spec.unit for spec in params)
    closed.sort(key=lambda item: (split and not item[0].unit, max(order[spec.fqn] for spec in item[1])))
    return Layout(stage, world, tuple(_lay_out(i, key, specs, world) for i, (key, specs) in enumerate(closed)), places)


def _lay_out(index: int, key: BucketKey, specs: Iterable[ParamSpec], world: int) -> Bucket:
    slots, at = [], 0
    for spec in specs:
        slots.append(Slot(spec.fqn, spec.shape, at, spec.numel))
        at += align(spec.numel)
    # Offsets do not depend on the world size; only the padding at the end does. At least one unit per rank, so that
    # a bucket of zero-element parameters still has a place for them.
    return Bucket(index, key, tuple(slots), align(max(at, 1), ALIGNMENT * world), world)
