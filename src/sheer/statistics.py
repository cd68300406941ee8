"""The one small all-reduce of a step: the gradient's norm, the mean loss, and which parameters any rank used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sheer.layout import Bucket, Interval
from sheer.zero import ZeroRuntime


class StepStatistics(NamedTuple):
    """Numbers of one step that all ranks share, on the device."""

    square_sum: torch.Tensor
    """Sum of the squares of the averaged gradient, each parameter counted once; fp32, 0-d."""
    mean_loss: torch.Tensor | None
    """Mean over micro-batches and ranks; None where `backward` saw no loss."""
    unused: frozenset[str]
    """Parameters that no rank used. Known without looking at the device when this rank has used all."""


def gather(runtime: ZeroRuntime, losses: Sequence[torch.Tensor], micro_batches: int) -> StepStatistics:
    """Collective on the data axis."""
    device = runtime.arena.device
    norms = [torch.linalg.vector_norm(grad.counted(), dtype=torch.float32) for grad in runtime.grads]
    square_sum = torch.stack(norms).square_().sum() if norms else torch.zeros((), device=device)
    loss_sum = torch.stack([loss.float().reshape(()) for loss in losses]).sum() if losses else square_sum.new_zeros(())
    if runtime.axis.size == 1:
        unused = runtime.unused_here()
    else:
        square_sum, loss_sum, unused = _over_ranks(runtime, square_sum, loss_sum)
    count = runtime.axis.size * micro_batches
    return StepStatistics(square_sum, loss_sum / count if losses else None, unused)


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


def first_not_finite(bucket: Bucket, span: Interval, values: torch.Tensor) -> str | None:
    """The first parameter with elements in `span` (whose gradient is `values`) that is not finite there."""
    bad = (~torch.isfinite(values)).nonzero()
    if not bad.numel():
        return None
    at = span.start + int(bad[0])
    return next((slot.fqn for slot in bucket.slots if slot.start <= at < slot.stop), None)
