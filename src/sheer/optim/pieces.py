"""The nouns of the flat update: what a rank updates, as the optimizer sees it, and parts of its state by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sheer.layout import Bucket, Interval


class Master(NamedTuple):
    """What this rank updates of one bucket: elements [owned] of it, in the optimizer's dtype."""

    bucket: Bucket
    owned: Interval
    tensor: torch.Tensor


class StatePiece(NamedTuple):
    """A part of one state of one parameter: elements [start, start + len(data)) of the flattened `shape`."""

    key: str
    fqn: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor


class SavedState(NamedTuple):
    """What a checkpoint says of one state of one parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Run:
    """Elements `span` of bucket `master`, as the optimizer sees them."""

    master: int
    span: Interval
    tensor: torch.Tensor
