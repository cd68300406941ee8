"""Classes at the top of a module, which may travel between stages."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class State:
    hidden: Any
    step: Any = 0
    count: int = field(default=0, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    mask: Any


class Output(dict):
    """A mapping that cannot travel."""


def same(a: Any, b: Any) -> bool:
    """Equal in types, contents, and which tensors need gradients."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        equal = a.dtype is b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        return equal and bits(a) == bits(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, State):
        return same([a.hidden, a.step, a.count], [b.hidden, b.step, b.count])
    if isinstance(a, Frozen):
        return same(a.mask, b.mask)
    return repr(a) == repr(b)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist())
