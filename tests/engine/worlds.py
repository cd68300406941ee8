"""Engines of several sizes inside one test: worlds of the first few ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist  # noqa: TID251  # makes groups of ranks, which no engine does

import sheer.testing
from sheer import checkpoint, comm
from tests.engine.oracle import values

T = TypeVar("T")


class Worlds:
    """Made on all ranks of a test; `within(size, body)` runs `body` on the first `size`, in a world of theirs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        ranks = sheer.testing.world_size()
        self._axes = {size: self._axis(list(range(size))) for size in range(1, ranks + 1)}

    @staticmethod
    def _axis(members: list[int]) -> comm.Axis | None:
        if len(members) == 1:
            return comm.Axis(None)
        group = dist.new_group(members)
        return comm.Axis(group) if sheer.testing.rank() in members else None

    def within(self, size: int, body: Callable[[], T]) -> T | None:
        """What `body` returned; None on other ranks. All ranks leave together."""
        result = None
        axis = self._axes[size]
        if sheer.testing.rank() < size:
            with self._patch.context() as patch:
                patch.setattr(comm, "data_axis", lambda: axis)
                result = body()
        dist.barrier()
        return result


def contents(directory: Any) -> dict[checkpoint.Key, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    index = checkpoint.open_checkpoint(directory)
    kinds = {key.kind for key, _ in index.entries()}
    return {
        checkpoint.Key(kind, name): tensor
        for kind in kinds
        for name, tensor in checkpoint.load_full(directory, kinds=(kind,)).items()
        if name not in index.ties
    }


def snapshot(engine: Any) -> dict[str, Any]:
    """This rank's part of all that a load may change, copied."""
    parts = engine._saved_parts()
    optimizer = engine.flat_optimizer()
    state = {
        "module": values(engine.module),
        "masters": [flat.master for flat in parts.plan.runtime.flats],
        "optimizer": [optimizer.base.state.get(run.tensor, {}) for run in optimizer.runs],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.base.param_groups],
        "counters": vars(engine.counters),
        "scheduler": engine.lr_scheduler and engine.lr_scheduler.state_dict(),
        "loss scale": parts.loss_scale and parts.loss_scale.state_dict(),
        "loader": engine.training_dataloader and engine.training_dataloader.state_dict(),
        "rng": torch.get_rng_state(),
    }
    return copy.deepcopy(state)


def assert_same(mine: Any, theirs: Any, path: str = "") -> None:
    """Equal to the bit, wherever in the structure."""
    if isinstance(theirs, torch.Tensor):
        assert mine.dtype is theirs.dtype, path
        assert torch.equal(mine, theirs), path
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), path
        for key in theirs:
            assert_same(mine[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), path
        for number, pair in enumerate(zip(mine, theirs, strict=True)):
            assert_same(*pair, f"{path}[{number}]")
    else:
        assert mine == theirs, path
