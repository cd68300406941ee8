"""The room over the real `comm.Axis`, on real processes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from sheer.checkpoint import Axis, load, load_full, open_together, save
from sheer.comm import Axis as RealAxis
from sheer.comm import data_axis
from sheer.errors import CheckpointError, CommError
from tests.checkpoint.ranks import cut, same


def shared_root(axis: RealAxis, tmp_path: Path) -> Path:
    """One new directory for all ranks: each has a `tmp_path` of its own, rank 0's is taken."""
    return Path(axis.broadcast_object(tmp_path))


@pytest.mark.world_size(2, 3)
def test_save_and_load_over_a_process_group(tmp_path: Path) -> None:
    real = data_axis()
    axis: Axis = real
    root = shared_root(real, tmp_path)
    value = torch.arange(100_000, dtype=torch.float64)
    saved = cut("param", "w", value, cuts=[7, 60_001, 99_999])[axis.rank :: axis.size]
    save(root, "t", shards=saved, facts={}, state={}, rng={"cpu": torch.get_rng_state()}, axis=axis)
    wanted = cut("param", "w", torch.zeros_like(value), cuts=[50_000, 50_001])[axis.rank :: axis.size]
    load(open_together(root, axis=axis), wanted=wanted, axis=axis)
    for shard in wanted:
        assert same(shard.data, value[shard.start : shard.stop])
    assert same(load_full(root)["w"], value)


@pytest.mark.world_size(2)
def test_a_fault_on_one_rank_is_an_error_on_all_and_the_axis_stays_usable(tmp_path: Path) -> None:
    axis = data_axis()
    root = shared_root(axis, tmp_path)
    pieces = cut("param", "w", torch.ones(1000), cuts=[500])
    shards = [pieces[axis.rank]]
    broken = mock.patch("os.fsync", side_effect=OSError(28, "No space left on device"))
    with broken if axis.rank == 1 else nullcontext(), pytest.raises(CheckpointError, match=r"rank 1: .*No space"):
        save(root, "t", shards=shards, facts={}, state={}, rng={}, axis=axis)
    axis.assemble("looked", timeout=30)
    save(root, "t", shards=shards, facts={}, state={}, rng={}, axis=axis)
    assert same(load_full(root)["w"], torch.ones(1000))


@pytest.mark.world_size(2)
def test_a_save_on_some_ranks_only_ends_in_an_error_that_names_the_others(tmp_path: Path) -> None:
    axis = data_axis()
    root = shared_root(axis, tmp_path)
    if axis.rank == 0:
        with pytest.raises(CommError, match=r"save_checkpoint.*1"):
            save(root, "t", shards=[], facts={}, state={}, rng={}, axis=axis, timeout=0.5)
        assert not any(root.iterdir())
