"""The room's one noun: a 1-D interval of a logical tensor; its dtypes, its checks, and how intervals tile a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sheer.errors import CheckpointError

# dtype -> its code in a safetensors header. What safetensors has no word for is labelled as bytes there; the index
# always knows the true dtype.
SAFETENSORS_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "U8",
    torch.float8_e5m2fnuz: "U8",
    torch.float8_e8m0fnu: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "U8",
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_CODES}


def nothing(_part: torch.Tensor) -> None:
    """Memory that stays where it is."""


class Key(NamedTuple):
    """What a tensor is called in a checkpoint."""

    kind: str
    """`param`, `buffer`, or `optim.<state name>` such as `optim.exp_avg`."""
    name: str
    """The fully qualified name of the parameter or buffer."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


class Interval(NamedTuple):
    """Elements `start` up to `stop` of a flattened tensor, and who holds them (for messages)."""

    start: int
    stop: int
    holder: str


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One 1-D interval of one logical tensor, held by this rank."""

    kind: str
    """`param`, `buffer`, or `optim.<state name>` such as `optim.exp_avg`."""
    name: str
    """The fully qualified name; with `kind` it is the tensor's identity."""
    shape: tuple[int, ...]
    """The whole tensor's shape; elements are counted in row-major order."""
    start: int
    """The first element of the interval."""
    data: torch.Tensor
    """1-D, contiguous: the elements, in the dtype to store; on load, where they go. Empty only where the tensor is."""
    rest: Callable[[torch.Tensor], None] = nothing
    """Called with every part of `data` that has been read, or filled, and will not be looked at for a while."""

    @property
    def key(self) -> Key:
        """Kind and name."""
        return Key(self.kind, self.name)

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.data.numel()


def check_shards(shards: Sequence[Shard]) -> None:
    """Refuse shards that do not describe an interval of a tensor. Looks at this rank's shards only."""
    for shard in shards:
        fault = _fault(shard)
        if fault:
            raise CheckpointError(f"{shard.key} {list(shard.shape)}: {fault}.")


def _fault(shard: Shard) -> str:
    """What is wrong with `shard`; empty when nothing is."""
    numel = math.prod(shard.shape)
    if not known_kind(shard.kind):
        return f"kind {shard.kind!r} is unknown; it is 'param', 'buffer' or 'optim.<state name>'"
    if not _is_text(shard.name) or not _is_text(shard.kind):
        return "its name is not valid Unicode text (it holds half a surrogate pair), so no file can hold it; rename it"
    if shard.data.dtype not in SAFETENSORS_CODES or shard.data.layout is not torch.strided:
        return f"{shard.data.dtype} ({shard.data.layout}) cannot be stored; dense tensors of {', '.join(DTYPES)} can"
    if shard.data.ndim != 1 or not shard.data.is_contiguous():
        return f"its data must be 1-D and contiguous, got {tuple(shard.data.shape)} with strides {shard.data.stride()}"
    if not 0 <= shard.start <= shard.stop <= numel:
        return f"the interval [{shard.start}, {shard.stop}) is outside its {numel} elements"
    if shard.data.numel() == 0 and numel != 0:
        return f"an empty interval of a tensor with {numel} elements; leave the shard out"
    return ""


def known_kind(kind: str) -> bool:
    """True for `param`, `buffer` and `optim.<state name>`."""
    return kind in ("param", "buffer") or (kind.startswith("optim.") and kind != "optim.")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def tiling_fault(numel: int, intervals: Iterable[Interval]) -> str:
    """How `intervals` fail to cover [0, numel) exactly once; empty when they do."""
    reached, holder = 0, "nobody"
    ordered = sorted(intervals)
    if not ordered:
        return "no rank holds any of it"
    for interval in ordered:
        if interval.start > reached:
            return f"elements {reached} to {interval.start - 1} are held by nobody"
        if interval.start < reached:
            return f"elements {interval.start} to {reached - 1} are held twice, by {holder} and {interval.holder}"
        reached, holder = interval.stop, interval.holder
    if reached < numel:
        return f"elements {reached} to {numel - 1} are held by nobody"
    return f"{holder} holds elements past its {numel}" if reached > numel else ""


def as_bytes(data: torch.Tensor) -> memoryview:
    """The bytes of a 1-D contiguous tensor: its own memory where the host can see it, else a copy."""
    host = data.detach().view(torch.uint8).numpy(force=True)
    return host.data if host.size else memoryview(b"")
