"""What DeepSpeed's model file says of the run besides tensors, in the words of our own checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sheer.checkpoint.formats.deepspeed.files import field
from sheer.checkpoint.formats.deepspeed.flat import Trained
from sheer.checkpoint.formats.foreign import as_json, hyperparameters
from sheer.checkpoint.formats.pickles import Inert

_OWN = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
        *("ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info"),
    }
)
"""The keys that DeepSpeed writes; others are the user's client state."""
_CLASSES = {"adam": "Adam", "adamw": "AdamW"}


def facts_of(run: Mapping[str, Any], trained: Trained, *, stage: int) -> dict[str, Any]:
    """What `save` takes as `facts`."""
    config = _config(run)
    low = [name for name in ("bf16", "fp16") if _section(config, name).get("enabled")]
    optimizer, scheduler = (_section(config, name).get("type") for name in ("optimizer", "scheduler"))
    facts: dict[str, Any] = {
        "run": {
            "writer": f"DeepSpeed {run.get('ds_version', '')}".strip(),
            "stage": stage,
            "world": run.get("dp_world_size", 1),
            "precision": low[0] if low else "fp32",
        },
        "optimizer": {"forms": trained.forms},
        "groups": trained.groups,
    }
    if trained.unreadable:
        facts["optimizer"]["unreadable"] = trained.unreadable
    if isinstance(optimizer, str):
        facts["optimizer"]["class"] = _CLASSES.get(optimizer.lower(), optimizer)
    if isinstance(scheduler, str):
        facts["scheduler"] = {"class": scheduler}
    return facts


def state_of(run: Mapping[str, Any], trained: Trained, said: list[str], *, path: Path) -> dict[str, Any]:
    """What `save` takes as `state`: counters, groups, loss scale, scheduler, client state."""
    steps, skipped = (int(field(run, key, path=path)) for key in ("global_steps", "skipped_steps"))
    state: dict[str, Any] = {
        "counters": {
            # DeepSpeed counts the steps that an overflow skipped among its steps.
            "global_steps": steps - skipped,
            "skipped_steps": skipped,
            "global_samples": int(field(run, "global_samples", path=path)),
            "micro_steps": steps * _accumulation(run),
        },
        "client_state": as_json({k: v for k, v in run.items() if k not in _OWN}, said, what="client state"),
    }
    if trained.settings:
        state["groups"] = [
            as_json(group, said, what="optimizer's groups") for group in hyperparameters(trained.settings)
        ]
    if trained.scaler is not None:
        state["loss_scale"] = _loss_scale(trained.scaler)
    if run.get("lr_scheduler"):
        state["scheduler"] = as_json(run["lr_scheduler"], said, what="scheduler's state")
    return state


def _loss_scale(scaler: Any) -> dict[str, Any]:
    """As `optim.loss_scale` says it. DeepSpeed counts steps since the last overflow, and the step in progress."""
    fields = vars(scaler) if isinstance(scaler, Inert) else scaler
    dynamic = fields.get("dynamic", fields.get("dynamic_loss_scale", False))
    good = int(fields.get("cur_iter", 0)) - int(fields.get("last_overflow_iter", -1)) - 1
    return {
        "scaling": "dynamic" if dynamic else "static",
        "scale": float(fields["cur_scale"]),
        "good_steps": max(good, 0) if dynamic else 0,
        "hysteresis_left": int(fields.get("cur_hysteresis", 1)),
    }


def _accumulation(run: Mapping[str, Any]) -> int:
    given = _config(run).get("gradient_accumulation_steps", 1)
    return given if isinstance(given, int) else 1


def _config(run: Mapping[str, Any]) -> Mapping[str, Any]:
    config = run.get("ds_config")
    return config if isinstance(config, dict) else {}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}
