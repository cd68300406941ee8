"""What in a saved state dict is the model, the optimizer, or neither, told by its paths.

An optimizer is a dict with `state` and `param_groups`, as `Optimizer.state_dict` or `get_optimizer_state_dict` give
it: keyed by name, by number, or flattened into `state.NAME.KEY` and `param_groups.NAME.SETTING`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sheer.errors import CheckpointError

Place = tuple[Any, ...]
"""A path in the saved state dict: keys of dicts and positions in lists."""
_MODELS = ("model", "module", "state_dict", "model_state_dict")


class Moment(NamedTuple):
    """One optimizer state of one parameter."""

    place: Place
    param: str
    """The parameter's name, or its number."""
    key: str


def find_optimizer(places: Sequence[Place]) -> Place | None:
    """The path of the optimizer; None where there is none. Raises CheckpointError where there are several."""
    found: list[Place] = []
    for place in places:
        cut = next((at for at, key in enumerate(place) if str(key).partition(".")[0] == "param_groups"), None)
        if cut is not None and place[:cut] not in found:
            found.append(place[:cut])
    if len(found) > 1:
        shown = ", ".join(".".join(map(str, place)) for place in found)
        raise CheckpointError(f"the checkpoint holds {len(found)} optimizers ({shown}); one is read.")
    return found[0] if found else None


def moments(places: Sequence[Place], optimizer: Place) -> list[Moment]:
    """The states that the optimizer at `optimizer` keeps."""
    made = []
    for place in places:
        rest = place[len(optimizer) :]
        if place[: len(optimizer)] != optimizer or not rest:
            continue
        if rest[0] == "state" and len(rest) == 3:
            made.append(Moment(place, str(rest[1]), str(rest[2])))
        elif len(rest) == 1 and str(rest[0]).startswith("state."):
            name, _, key = str(rest[0]).removeprefix("state.").rpartition(".")
            made.append(Moment(place, name, key))
    return made


def groups_of(settings: Mapping[Place, Any], optimizer: Place) -> list[dict[str, Any]]:
    """The optimizer's groups. Flattened ones are put together again: names with equal settings are a group."""
    groups: dict[Any, dict[str, Any]] = {}
    flattened: dict[str, dict[str, Any]] = {}
    for place, value in settings.items():
        rest = place[len(optimizer) :]
        if place[: len(optimizer)] != optimizer or not rest:
            continue
        if rest[0] == "param_groups" and len(rest) == 3:
            groups.setdefault(rest[1], {})[rest[2]] = value
        elif len(rest) == 1 and str(rest[0]).startswith("param_groups."):
            name, _, key = str(rest[0]).removeprefix("param_groups.").rpartition(".")
            flattened.setdefault(name, {})[key] = value
    for name, group in flattened.items():
        alike = groups.setdefault(repr(sorted(group.items())), {**group, "params": []})
        alike["params"].append(name)
    return list(groups.values())


def find_model(places: Sequence[Place]) -> Place:
    """The path of the model's state dict among those of tensors outside the optimizer."""
    found = list(dict.fromkeys(place[:-1] for place in places))
    if len(found) == 1:
        return found[0]
    named = [place for place in found if place and place[-1] in _MODELS]
    if len(named) != 1:
        shown = ", ".join(repr(".".join(map(str, place))) for place in found) or "none"
        raise CheckpointError(
            f"which tensors are the model's cannot be told; they lie under {shown}. One of these is to be called "
            f"{' or '.join(_MODELS)}."
        )
    return named[0]
