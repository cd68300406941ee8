"""How DeepSpeed's flat masters are cut by name, where no checkpoint made on a CPU shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sheer.checkpoint.formats.deepspeed import read
from sheer.errors import CheckpointError


def write(folder: Path, **optimizer: object) -> Path:
    flat = torch.arange(6.0).bfloat16()
    run = {"module": {"a": flat[:4].view(2, 2), "b": flat[4:]}, "buffer_names": [], "optimizer": dict(optimizer)}
    counters = {"global_steps": 5, "skipped_steps": 1, "global_samples": 40}
    torch.save({**run, **counters, "ds_version": "0.19.8"}, folder / "mp_rank_00_model_states.pt")
    return folder


def fused(**changes: object) -> dict[str, object]:
    """As with FusedAdam: steps are counted by group."""
    state = {0: {"exp_avg": torch.arange(6.0) / 10}}
    groups = [{"lr": 0.1, "step": 4, "bias_correction": True, "params": [0]}]
    inner = {"optimizer_state_dict": {"state": state, "param_groups": groups}}
    return {**inner, "fp32_groups_flat": [torch.arange(6.0)], **changes}


def test_steps_that_are_counted_by_group_become_each_parameters(tmp_path: Path) -> None:
    foreign = read(write(tmp_path, **fused()), None)
    found = {(shard.kind, shard.name): shard.data.tolist() for shard in foreign.shards}
    assert found == {
        ("param", "a"): [0, 1, 2, 3],
        ("param", "b"): [4, 5],
        ("optim.step", "a"): [4],
        ("optim.step", "b"): [4],
        ("optim.exp_avg", "a"): pytest.approx([0, 0.1, 0.2, 0.3]),
        ("optim.exp_avg", "b"): pytest.approx([0.4, 0.5]),
    }
    assert foreign.facts["optimizer"]["forms"] == {"exp_avg": "element", "step": "scalar"}
    assert foreign.state["groups"] == [{"lr": 0.1, "bias_correction": True}]
    counters = {"global_steps": 4, "skipped_steps": 1, "global_samples": 40, "micro_steps": 5}
    assert foreign.state["counters"] == counters


def test_masters_that_are_no_parameters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no parameters have the values of one of the optimizer's masters"):
        read(write(tmp_path, **fused(fp32_groups_flat=[torch.ones(6)])), None)


def test_what_is_not_as_it_is_written_is_refused_with_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} is .*damaged, or made by another version"):
        read(write(tmp_path, fp32_groups_flat=[torch.ones(6)]), None)
