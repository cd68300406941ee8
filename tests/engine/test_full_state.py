"""`engine.full_state_dict`: whole tensors at any stage, as the module would have them alone."""

from __future__ import annotations

import pytest
import torch

import sheer
import sheer.testing
from sheer.errors import UsageError
from tests.engine.models import batches, odd
from tests.pairs import beginning, noted, pairs

ROWS = pairs((1, 2, 3), (0, 1, 2, 3), (True, False))


@pytest.mark.world_size(1, 2, 3)
def test_it_is_what_a_checkpoint_has(world_size: int, tmp_path) -> None:
    for stage, rank0_only in beginning(world_size, ROWS):
        with noted(stage, rank0_only):
            assert_what_a_checkpoint_has(stage, rank0_only, tmp_path / f"{stage} {rank0_only}")


def assert_what_a_checkpoint_has(stage: int, rank0_only: bool, tmp_path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    engine = sheer.initialize(model=odd(), config=config)[0]
    for tokens in batches(2, size=2):
        engine.backward(engine(tokens))
        engine.step()
    state = engine.full_state_dict(rank0_only=rank0_only)
    engine.save_checkpoint(tmp_path)
    if rank0_only and sheer.testing.rank():
        assert state == {}
    else:
        plain = odd()
        assert list(state) == list(plain.state_dict())
        plain.load_state_dict(state)
        saved = sheer.checkpoint.load_full(tmp_path)
        for fqn, value in plain.state_dict().items():
            assert torch.equal(value, saved[fqn])
    before = {fqn: value.clone() for fqn, value in state.items()}
    engine.backward(engine(batches(1, size=2)[0]))
    engine.step()
    assert all(torch.equal(value, before[fqn]) for fqn, value in state.items())  # it has memory of its own
    engine.destroy()


@pytest.mark.world_size(2)
def test_the_module_s_own_is_refused_where_it_would_hold_placeholders() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    engine = sheer.initialize(model=odd(), config=config)[0]
    with pytest.raises(UsageError, match=r"full_state_dict\(\)"):
        engine.module_state_dict()
    engine.destroy()
