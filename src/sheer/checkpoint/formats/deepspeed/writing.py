"""A universal checkpoint, as DeepSpeed loads it at stages 1 and 2 with `"checkpoint": {"load_universal": true}`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sheer.checkpoint.formats.weights import Weights, aside
from sheer.errors import CheckpointError

_VERSION = "0.19.8"
"""What is written is as that version writes it."""
_INFO = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}


def write(weights: Weights, target: Path) -> list[Path]:
    """Make the folder `target` with one checkpoint and `latest_universal`; the files made.

    One tensor at a time is in memory, and all that no optimizer trains. Stage 3 of DeepSpeed wants another form.
    """
    if not weights.moments or not weights.groups():
        raise CheckpointError("the checkpoint has no optimizer state, of which a universal checkpoint is made.")
    counters = weights.state.get("counters", {})
    steps = int(counters.get("global_steps", 0)) + int(counters.get("skipped_steps", 0))
    tag = f"global_step{steps}"
    with aside(target) as place:
        zero = place / tag / "zero"
        zero.mkdir(parents=True)
        for name in weights.moments:
            _write_one(weights, name, zero / name)
        common = {"param_groups": _groups(weights), "ds_version": _VERSION}
        torch.save(common, zero / "optimizer_state.pt")
        torch.save(_run(weights, steps), place / tag / "mp_rank_00_model_states.pt")
        (place / "latest_universal").write_text(tag)
    return sorted(path for path in target.rglob("*") if path.is_file())


def _write_one(weights: Weights, name: str, folder: Path) -> None:
    """A parameter and its states, a file each."""
    folder.mkdir()
    torch.save({"param": weights.tensor(name).float(), "cat_dim": 0}, folder / "fp32.pt")
    for state in weights.moments[name]:
        value = weights.moment(name, state)
        torch.save({"param": value, "cat_dim": 0} if value.dim() else value, folder / f"{state}.pt")


def _groups(weights: Weights) -> list[dict[str, Any]]:
    """Groups as DeepSpeed has them: each is one flat tensor."""
    return [{**group, "params": [number]} for number, group in enumerate(weights.groups())]


def _run(weights: Weights, steps: int) -> dict[str, Any]:
    """The model file: the module's state dict, counters, schedule, client state."""
    module = {name: weights.tensor(name) for name in weights.listed}
    module.update({alias: module[owner] for alias, owner in weights.ties.items() if owner in module})
    shapes = [{n: torch.Size(weights.listed[n].shape) for n in group["params"]} for group in weights.groups()]
    counters = weights.state.get("counters", {})
    return {
        "module": module,
        "buffer_names": [name for name, weight in weights.listed.items() if weight.key.kind == "buffer"],
        "optimizer": None,
        "param_shapes": shapes,
        "lr_scheduler": weights.state.get("scheduler"),
        "global_steps": steps,
        "skipped_steps": int(counters.get("skipped_steps", 0)),
        "global_samples": int(counters.get("global_samples", 0)),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": _VERSION,
        **_INFO,
        **weights.state.get("client_state", {}),
    }
