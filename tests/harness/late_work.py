"""Asynchronous collectives as NCCL has them, on gloo: nothing has happened until they are waited on.

gloo hides the bugs that matter on a GPU: it has copied a buffer before the caller overwrites it, and has often finished
before the caller reads. Inside `late_collectives()` an asynchronous collective, or a message from rank to rank,

- works on copies, which really are on their way while the caller goes on;
- fills its outputs with NaN at launch (the largest integer where there is no NaN), so that an early read shows; with
  *signalling* NaN, which arithmetic turns into quiet NaN, so that an accumulation in flight shows as well;
- brings the results in at its *own* `wait()`: waiting on a later one of the same group finishes nothing;
- asserts at `wait()` that nobody wrote to its inputs or outputs meanwhile, nor resized their storages;
- must have been waited on when the block ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

# Which parameters of each collective are read and which are written. Torch 2.13 renamed two of them; both names work.
BUFFERS = {
    "all_gather_into_tensor": (("input_tensor",), ("output_tensor",)),
    "all_gather_single": (("input_tensor",), ("output_tensor",)),
    "reduce_scatter_tensor": (("input",), ("output",)),
    "reduce_scatter_single": (("input",), ("output",)),
    "all_to_all_single": (("input",), ("output",)),
    "all_reduce": (("tensor",), ("tensor",)),
    "broadcast": (("tensor",), ("tensor",)),
    "isend": (("tensor",), ()),
    "irecv": ((), ("tensor",)),
}
GATHERS = {"all_gather_into_tensor", "all_gather_single"}

# The quiet bit is clear and a lower one is set.
SIGNALLING_NAN = {
    torch.float64: (torch.int64, 0x7FF4_0000_0000_0000),
    torch.float32: (torch.int32, 0x7FA0_0000),
    torch.float16: (torch.int16, 0x7D00),
    torch.bfloat16: (torch.int16, 0x7FA0),
}


class LeaseViolation(AssertionError):
    """A buffer was touched between the launch of a collective and its wait."""


class Launch(NamedTuple):
    """One collective in launch order. The lists of all ranks of a group must be equal."""

    op: str
    numel: int
    dtype: torch.dtype
    ranks: tuple[int, ...]


class Lease:
    """A buffer lent to a collective, and what it looked like when it was lent."""

    def __init__(self, role: str, tensor: torch.Tensor) -> None:
        self._role, self.tensor = role, tensor
        self._storage = tensor.untyped_storage()
        self._place = (self._storage.data_ptr(), self._storage.nbytes())
        self._content = bits(tensor).clone()

    def check(self, op: str) -> None:
        """Raise where it does not look like that any more."""
        place = (self._storage.data_ptr(), self._storage.nbytes())
        if place != self._place:
            raise LeaseViolation(
                f"{op}: the storage of its {self._role} was resized in flight, "
                f"from {self._place[1]} to {place[1]} bytes"
            )
        if not torch.equal(bits(self.tensor), self._content):
            raise LeaseViolation(f"{op}: its {self._role} was written in flight")


class LateWork:
    """What a late collective returns in place of torch's `Work`."""

    def __init__(self, op: str, leases: list[Lease], results: list[tuple[torch.Tensor, torch.Tensor]], work: dist.Work):
        self.op, self._leases, self._results, self._work = op, leases, results, work
        self.waited = False

    def wait(self, timeout: Any = None) -> bool:
        """Check the leases, then bring the results in."""
        if self.waited:
            return True
        self.waited = True
        self._work.wait()
        for lease in self._leases:
            lease.check(self.op)
        for output, result in self._results:
            overwrite(output, lambda t, result=result: t.copy_(result))
        return True

    def is_completed(self) -> bool:
        """False until waited on: as late as a collective may be."""
        return self.waited


class LateCollectives:
    """What happened in a `late_collectives()` block."""

    def __init__(self) -> None:
        self.log: list[Launch] = []
        self.works: list[LateWork] = []

    @property
    def in_flight(self) -> list[LateWork]:
        """Launched and not waited on yet."""
        return [work for work in self.works if not work.waited]

    def launch(self, op: str, real: Callable[..., Any], arguments: dict[str, Any]) -> LateWork:
        """Start the real collective on copies, and lend the caller's buffers to it."""
        reads, writes = BUFFERS[op]
        if op == "broadcast" and _is_source(arguments):
            writes = ()
        copies = {name: arguments[name].detach().clone() for name in {*reads, *writes}}
        first = arguments[(*reads, *writes)[0]]
        kept = first.detach().clone()
        work = real(**(arguments | copies))
        ranks = dist.get_process_group_ranks(arguments["group"] or dist.group.WORLD)
        self.log.append(Launch(op, first.numel(), first.dtype, tuple(ranks)))
        for name in writes:
            overwrite(arguments[name], poison)
        if op in GATHERS:  # in place, a rank's own part of the output is its input, which stays readable
            overwrite(first, lambda t: t.copy_(kept))
        # Taken after the poison, which may lie inside an input (a shard of the buffer that is scattered).
        leases = [Lease("output" if name in writes else "input", arguments[name]) for name in copies]
        self.works.append(LateWork(op, leases, [(arguments[name], copies[name]) for name in writes], work))
        return self.works[-1]


@contextmanager
def late_collectives() -> Iterator[LateCollectives]:
    """Make asynchronous collectives of `torch.distributed` late while the block runs."""
    record = LateCollectives()
    with mock.patch.multiple(dist, **{op: _late(op, record) for op in BUFFERS}):
        yield record
    forgotten = [work.op for work in record.in_flight]
    if forgotten:
        raise LeaseViolation(f"never waited on: {', '.join(forgotten)}")


def _is_source(arguments: dict[str, Any]) -> bool:
    group = arguments["group"] or dist.group.WORLD
    if arguments["group_src"] is not None:
        return bool(dist.get_rank(group) == arguments["group_src"])
    return bool(dist.get_rank() == arguments["src"])


def _late(op: str, record: LateCollectives) -> Callable[..., Any]:
    real = getattr(dist, op)
    signature = inspect.signature(real)

    def collective(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if not bound.arguments.get("async_op", True) or dist.get_rank(bound.arguments["group"]) < 0:
            return real(*args, **kwargs)
        return record.launch(op, real, dict(bound.arguments))

    return collective


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaNs compare equal to themselves."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def poison(tensor: torch.Tensor) -> None:
    """Fill with what no computation survives unseen."""
    if tensor.dtype in SIGNALLING_NAN:
        integer, pattern = SIGNALLING_NAN[tensor.dtype]
        tensor.view(integer).fill_(pattern)
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def overwrite(tensor: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> None:
    """Write as a collective does: autograd does not see it."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
        write(tensor)
