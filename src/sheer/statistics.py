"""The one small all-reduce of a step: the gradient's norm, the mean loss, and which parameters any rank used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch

from sheer.comm import Mesh
from sheer.errors import UsageError
from sheer.layout import Bucket, Layout, Slot
from sheer.zero import ZeroRuntime


class Census(NamedTuple):
    """What all ranks must know of each other to share one message."""

    names: tuple[str, ...]
    """The trainable parameters of the whole model: those of the first stage in plan order, then what others add."""
    places: torch.Tensor | None
    """Where in `names` this stage's are, in plan order; None where they are all there is. [parameters], int64"""
    dtype: torch.dtype
    """What sums are carried in: fp32, or fp64 where some gradient is."""


def take(layout: Layout, mesh: Mesh, device: torch.device) -> Census:
    """Collective on all ranks. Raises on all where stages disagree about a parameter that they share."""
    mine = tuple(bucket for bucket in layout.buckets if bucket.trainable)
    names = tuple(slot.fqn for bucket in mine for slot in bucket.slots)
    dtype = _widest(bucket.key.grad_dtype for bucket in mine)
    if mesh.stages == 1:
        return Census(names, None, dtype)
    told: list[tuple[tuple[str, ...], torch.dtype, list[Bucket]]] = mesh.pipe.gather_objects(
        (names, dtype, [bucket for bucket in layout.buckets if bucket.key.tie])
    )
    _check_ties([tied for _, _, tied in told])
    everybody = dict.fromkeys(name for stage, _, _ in told for name in stage)
    order = {name: place for place, name in enumerate(everybody)}
    places = torch.tensor([order[name] for name in names], dtype=torch.int64, device=device)
    return Census(tuple(everybody), places, _widest(dtype for _, dtype, _ in told))


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, dtypes, torch.float32)


def _check_ties(tied: Sequence[Sequence[Bucket]]) -> None:
    """All holders of a tied parameter train it alike: same dtype, same optimizer group, or all frozen."""
    seen: dict[str, tuple[int, str]] = {}
    for stage, buckets in enumerate(tied):
        for bucket in buckets:
            for slot in bucket.slots:
                mine = _kind_of(bucket, slot)
                first, expected = seen.setdefault(slot.fqn, (stage, mine))
                if mine != expected:
                    raise UsageError(
                        f"parameter {slot.fqn!r} is shared by stages {list(bucket.key.tie)}, but it is {expected} on "
                        f"stage {first} and {mine} on stage {stage}: give it one shape and dtype, one optimizer group, "
                        "and freeze or unfreeze it on all of them together"
                    )


def _kind_of(bucket: Bucket, slot: Slot) -> str:
    key = bucket.key
    group = "trained by no optimizer group" if key.group is None else f"in optimizer group {key.group}"
    unit = f", gathered with {key.unit}" if key.unit else ""
    return f"{tuple(slot.shape)} {key.dtype} with gradients in {key.grad_dtype}, {group}{unit}"


class StepStatistics(NamedTuple):
    """Numbers of one step that all ranks share, on the device."""

    square_sum: torch.Tensor
    """Sum of the squares of the averaged gradient, each parameter counted once; 0-d, fp32 or wider."""
    mean_loss: torch.Tensor | None
    """Mean over micro-batches and ranks; None where `backward` saw no loss."""
    unused: frozenset[str]
    """Parameters that no rank used. Known without looking at the device when this rank has used all."""
    over: bool
    """Whether what is going on beside training is over on every rank."""


def gather(
    runtime: ZeroRuntime,
    census: Census,
    losses: Sequence[torch.Tensor],
    micro_batches: int,
    *,
    over: bool | None = None,
) -> StepStatistics:
    """Collective on all ranks; with several stages the last one brings the losses.

    `over` is whether something beside training is over here; None, on all ranks, where nothing is going on. Where it is
    given, one number is read from the device.
    """
    device = runtime.arena.device
    norms = [_norm(grad.counted()).to(device, census.dtype) for grad in runtime.grads if runtime.counts(grad.flat.plan)]
    square_sum = torch.stack(norms or [torch.zeros((), dtype=census.dtype, device=device)]).square_().sum()
    loss_sum = square_sum.new_zeros(())
    if losses:
        loss_sum = torch.stack([loss.to(census.dtype).reshape(()) for loss in losses]).sum()
    if runtime.mesh.world.size == 1:
        unused = runtime.unused_here()
    else:
        square_sum, loss_sum, unused, over = _over_ranks(runtime, census, square_sum, loss_sum, over)
    mean_loss = loss_sum / (runtime.axis.size * micro_batches) if losses or runtime.mesh.stages > 1 else None
    return StepStatistics(square_sum, mean_loss, unused, bool(over))


def _norm(values: torch.Tensor) -> torch.Tensor:
    """In fp32, or in fp64 where the values are."""
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm


class _Shared(NamedTuple):
    square_sum: torch.Tensor
    loss_sum: torch.Tensor
    unused: frozenset[str]
    over: bool


def _over_ranks(
    runtime: ZeroRuntime, census: Census, square_sum: torch.Tensor, loss_sum: torch.Tensor, over: bool | None
) -> _Shared:
    usage = runtime.usage()
    if census.places is not None:
        usage = usage.new_zeros(len(census.names)).index_copy_(0, census.places, usage)
    words = [torch.stack((square_sum, loss_sum)), usage]
    if over is not None:
        words.append(usage.new_full((1,), float(over)))
    message = torch.cat(words)
    runtime.world_lane.all_reduce(message, what="step statistics").wait()
    here = runtime.unused_here()
    # A parameter used here is used by somebody: only a rank that left some out has to look, or that has none.
    unused = here
    if here or not runtime.grads:
        unused = frozenset(
            name for name, used in zip(census.names, message[2:][: len(usage)].tolist(), strict=True) if not used
        )
    everywhere = over is not None and message[-1].item() == runtime.mesh.world.size
    return _Shared(message[0], message[1], unused, everywhere)


class _Place(NamedTuple):
    """Where a number is not finite, in the order in which backward reaches it."""

    stages_after: int
    bucket: int
    element: int
    fqn: str


def first_not_finite(runtime: ZeroRuntime) -> str | None:
    """The first parameter, as backward reaches them, whose reduced gradient is not finite: where an overflow begins.

    None where only their norm is beyond the numbers. Collective on all ranks.
    """
    found: list[_Place | None] = runtime.mesh.world.gather_objects(_first_bad_place(runtime))
    places = [place for place in found if place is not None]
    return min(places).fqn if places else None


def _first_bad_place(runtime: ZeroRuntime) -> _Place | None:
    """The first number in this rank's shards that is not finite."""
    stages_after = runtime.mesh.stages - 1 - runtime.mesh.stage
    for number, grad in enumerate(runtime.grads):
        bad = (~torch.isfinite(grad.counted())).nonzero()
        if bad.numel():
            at = grad.shard.start + int(bad[0])
            return _Place(stages_after, number, at, next(s.fqn for s in grad.flat.plan.slots if at < s.stop))
    return None
