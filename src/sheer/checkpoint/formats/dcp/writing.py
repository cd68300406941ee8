"""A folder that `torch.distributed.checkpoint.load` reads, written by that library, by this process alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from sheer.checkpoint.formats.weights import Weights, aside


def write(weights: Weights, target: Path) -> list[Path]:
    """Make the folder `target` of `{"model": ..., "optim": ...}`, as `get_state_dict` names it; the files made.

    Takes as much memory as all that is written. There is no "optim" where the checkpoint has no optimizer state.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    model = {name: weights.tensor(name) for name in weights.listed}
    model.update({alias: model[owner] for alias, owner in weights.ties.items() if owner in model})
    state: dict[str, Any] = {"model": model}
    if weights.moments:
        moments = {name: {key: weights.moment(name, key) for key in keys} for name, keys in weights.moments.items()}
        state["optim"] = {"state": moments, "param_groups": weights.groups()}
    with aside(target) as place, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is what is meant
        save(state, checkpoint_id=place, no_dist=True)
    return sorted(target.iterdir())
