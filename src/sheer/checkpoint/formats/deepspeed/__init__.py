"""DeepSpeed's checkpoints, as 0.19 writes them: ZeRO stages 0 to 3, pipelines, universal. Read with all that trains.

files.py      which file is what                       flat.py     masters and moments, cut by name
universal.py  a folder per name                        layers.py   a pipeline's stages and layers
run.py        counters, groups, schedule, loss scale   writing.py   the universal form
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sheer.checkpoint.formats.deepspeed.files import Files, field, find, read_file, sort_files
from sheer.checkpoint.formats.deepspeed.flat import (
    Trained,
    read_by_memory,
    read_by_number,
    read_frozen,
    read_stage_1_and_2,
    read_stage_3,
)
from sheer.checkpoint.formats.deepspeed.layers import read_pipeline
from sheer.checkpoint.formats.deepspeed.run import facts_of, state_of
from sheer.checkpoint.formats.deepspeed.universal import read_universal
from sheer.checkpoint.formats.deepspeed.writing import write
from sheer.checkpoint.formats.foreign import Foreign, tied_names, whole
from sheer.checkpoint.shard import check_shards
from sheer.errors import CheckpointError

__all__ = ["find", "read", "write"]

Run = Mapping[str, Any]
"""The content of the first model file."""

_NO_NAMES = (
    "DeepSpeed numbers the parameters of its optimizer at stage 0, and which number is which name is known only from "
    "the optimizer groups of a run"
)


class _Parts(NamedTuple):
    """What one kind of checkpoint holds, by name."""

    trained: Trained
    module: Mapping[str, torch.Tensor]
    """Tensors that no optimizer trains; names that `trained` has too are not looked at."""
    ties: dict[str, str]
    stage: int


_OTHERWISE = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What reading data of another structure ends in."""


def read(path: Path, groups: Sequence[Sequence[str]] | None) -> Foreign:
    """What the checkpoint in the directory `path` holds. `groups` names what stage 0 numbers."""
    try:
        foreign = _read(path, groups)
        check_shards(foreign.shards)
    except CheckpointError:
        raise
    except _OTHERWISE as error:
        raise CheckpointError(
            f"{path} is a checkpoint of DeepSpeed's whose files do not hold what version 0.19 writes there "
            f"({type(error).__name__}: {error}); one is damaged, or made by another version. Nothing was loaded."
        ) from error
    return foreign


def _read(path: Path, groups: Sequence[Sequence[str]] | None) -> Foreign:
    files = sort_files(path)
    first = (files.model or files.parts)[0]
    run = read_file(first)
    kind, of_kind = next((name, kind) for name, kind in _KINDS.items() if kind.has(files))
    said = [f"{path} is a checkpoint of DeepSpeed {run.get('ds_version', '(version unknown)')}: {kind}"]
    parts = of_kind.read(files, run, groups)
    buffers = frozenset(run.get("buffer_names") or ())
    trained, ties = parts.trained, parts.ties
    rest = [
        whole("buffer" if name in buffers else "param", name, tensor)
        for name, tensor in parts.module.items()
        if name not in trained.names and name not in ties
    ]
    facts = facts_of(run, trained, stage=parts.stage)
    return Foreign([*trained.shards, *rest], ties, said, facts, state_of(run, trained, said, path=first))


# --- one function per kind --------------------------------------------------------------------------------------------


def _universal(files: Files, run: Run, groups: Sequence[Sequence[str]] | None) -> _Parts:
    assert files.universal is not None
    trained = Trained()
    rest = read_universal(files.universal, _flattened(run), trained)
    read_frozen(files.parts, trained)
    shapes = run.get("param_shapes") or ()
    if len(shapes) == len(trained.settings):
        trained.groups = {name: group for group, named in enumerate(shapes) for name in named}
    held = _held(run)  # its buffers are in their own dtype, in `rest` they are in fp32
    return _Parts(trained, {**rest, **held}, _ties(run, held, trained), _stage(run))


def _pipeline(files: Files, run: Run, groups: Sequence[Sequence[str]] | None) -> _Parts:
    trained, ties, layers = read_pipeline(files)
    return _Parts(trained, layers, ties, _stage(run))


def _stage_3(files: Files, run: Run, groups: Sequence[Sequence[str]] | None) -> _Parts:
    trained = Trained()
    read_stage_3(files.optim[0], field(run, "param_shapes", path=files.parts[0]), trained)
    read_frozen(files.parts, trained)
    # What is tied has a name here and no elements; which parameter it is tied to is not said.
    held = _held(run)
    return _Parts(trained, held, _ties(run, held, trained), 3)


def _stages_1_and_2(files: Files, run: Run, groups: Sequence[Sequence[str]] | None) -> _Parts:
    trained, held = Trained(), _held(run)
    read_stage_1_and_2(files.optim[0], _flattened(run), trained)
    return _Parts(trained, held, _ties(run, held, trained), _stage(run))


def _stage_0(files: Files, run: Run, groups: Sequence[Sequence[str]] | None) -> _Parts:
    trained, held = Trained(), _held(run)
    ties = _ties(run, held, trained)
    content = run.get("optimizer")
    own = {name: t for name, t in held.items() if name not in ties and name not in (run.get("buffer_names") or ())}
    named = _names_of(content, list(own), groups) if content and held else None
    if content and "fp32_groups_flat" in content:
        read_by_memory(content, own, trained)
    elif content and named is not None:
        read_by_number(content, named, held, trained)
    elif content:
        trained.unreadable = _NO_NAMES if held else f"{_NO_NAMES}; for a pipeline not even then"
    layers = {f"{number}.{local}": t for number, path in files.layers.items() for local, t in read_file(path).items()}
    return _Parts(trained, {**held, **layers}, ties, 0)


def _names_of(
    content: Mapping[str, Any], own: Sequence[str], groups: Sequence[Sequence[str]] | None
) -> Sequence[Sequence[str]] | None:
    """The names of the numbered parameters; None where they cannot be told."""
    settings = content.get("optimizer_state_dict", content).get("param_groups", [])
    candidates = [groups] if groups is not None else [[own]] if len(settings) == 1 else []
    sizes = [len(group["params"]) for group in settings]
    return next((named for named in candidates if [len(group) for group in named] == sizes), None)


def _held(run: Run) -> dict[str, torch.Tensor]:
    """The module's state dict, without what stage 3 holds elsewhere."""
    module = run.get("module") or {}
    shapes = _flattened(run)
    sharded = run.get("frozen_param_fragments") is not None
    return {name: t for name, t in module.items() if not sharded or t.numel() or name in shapes}


def _flattened(run: Run) -> dict[str, Any]:
    """Name -> shape of all that is trained."""
    return {name: shape for group in run.get("param_shapes") or () for name, shape in group.items()}


def _ties(run: Run, held: Mapping[str, torch.Tensor], trained: Trained) -> dict[str, str]:
    """Alias -> own name: names that share memory, or that DeepSpeed found to. The own name is the one that trains."""
    ties = {**tied_names(held), **(run.get("shared_params") or {})}
    for alias, owner in list(ties.items()):
        if alias in trained.names and owner not in trained.names:
            ties = {name: alias if to == owner else to for name, to in ties.items() if name != alias} | {owner: alias}
    return ties


def _stage(run: Run) -> int:
    section = (run.get("ds_config") or {}).get("zero_optimization")
    return int(section.get("stage", 0)) if isinstance(section, dict) else 0


class _Kind(NamedTuple):
    """How to know a kind of checkpoint by its files, and how to read it."""

    has: Callable[[Files], bool]
    read: Callable[[Files, Run, Sequence[Sequence[str]] | None], _Parts]


_KINDS = {
    "a universal one": _Kind(lambda files: files.universal is not None, _universal),
    "a pipeline's with ZeRO": _Kind(lambda files: bool(files.layers and files.optim), _pipeline),
    "ZeRO stage 3": _Kind(lambda files: bool(files.parts and files.optim), _stage_3),
    "ZeRO stage 1 or 2": _Kind(lambda files: bool(files.optim), _stages_1_and_2),
    "without ZeRO": _Kind(lambda files: True, _stage_0),
}
