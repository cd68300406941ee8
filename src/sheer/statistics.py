"""The one small all-reduce of a step: the gradient's norm, the mean loss, and which parameters any rank used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sheer.zero import ZeroRuntime


class StepStatistics(NamedTuple):
    """Numbers of one step that all ranks share, on the device."""

    square_sum: torch.Tensor
    """Sum of the squares of the averaged gradient, each parameter counted once; 0-d, fp32 or wider."""
    mean_loss: torch.Tensor | None
    """Mean over micro-batches and ranks; None where `backward` saw no loss."""
    unused: frozenset[str]
    """Parameters that no rank used. Known without looking at the device when this rank has used all."""


def gather(runtime: ZeroRuntime, losses: Sequence[torch.Tensor], micro_batches: int) -> StepStatistics:
    """Collective on the data axis."""
    device = runtime.arena.device
    norms = [_norm(grad.counted()) for grad in runtime.grads]
    wide = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else torch.float32
    square_sum = torch.stack([norm.to(wide) for norm in norms] or [torch.zeros((), device=device)]).square_().sum()
    loss_sum = torch.stack([loss.to(wide).reshape(()) for loss in losses]).sum() if losses else square_sum.new_zeros(())
    if runtime.axis.size == 1:
        unused = runtime.unused_here()
    else:
        square_sum, loss_sum, unused = _over_ranks(runtime, square_sum, loss_sum)
    count = runtime.axis.size * micro_batches
    return StepStatistics(square_sum, loss_sum / count if losses else None, unused)


def _norm(values: torch.Tensor) -> torch.Tensor:
    """In fp32, or in fp64 where the values are."""
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm


class _Shared(NamedTuple):
    square_sum: torch.Tensor
    loss_sum: torch.Tensor
    unused: frozenset[str]


def _over_ranks(runtime: ZeroRuntime, square_sum: torch.Tensor, loss_sum: torch.Tensor) -> _Shared:
    usage = runtime.usage()
    both = torch.stack((square_sum, loss_sum))
    message = torch.cat((both, usage))
    runtime.lane.all_reduce(message, what="step statistics").wait()
    here = runtime.unused_here()
    # A parameter used here is used by somebody: only a rank that left some out has to look.
    unused = frozenset(runtime.names_where(message[2:] == 0)) if here else here
    return _Shared(message[0], message[1], unused)


def first_not_finite(runtime: ZeroRuntime) -> str | None:
    """The first parameter, as backward reaches them, whose reduced gradient is not finite: where an overflow begins.

    None where only their norm is beyond the numbers. Collective on the data axis.
    """
    found: list[tuple[int, int] | None] = runtime.axis.gather_objects(_first_bad_place(runtime))
    places = [place for place in found if place is not None]
    if not places:
        return None
    number, at = min(places)
    return next(slot.fqn for slot in runtime.grads[number].flat.plan.slots if at < slot.stop)


def _first_bad_place(runtime: ZeroRuntime) -> tuple[int, int] | None:
    """Bucket and element of the first number in this rank's shards that is not finite."""
    for number, grad in enumerate(runtime.grads):
        bad = (~torch.isfinite(grad.counted())).nonzero()
        if bad.numel():
            return number, grad.shard.start + int(bad[0])
    return None
