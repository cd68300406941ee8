"""Where a DeepSpeed checkpoint is and which of its files are what, told by their names alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from sheer.checkpoint.formats.pickles import Inert, read_pickle
from sheer.errors import CheckpointError

# Classes of DeepSpeed's own that its files hold, all of them plain data, and one that scripts put beside.
_INERT = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "argparse.Namespace",
)

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL_3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"layer_.*expert_.*\.pt|expp_rank_.*\.pt")


class Files(NamedTuple):
    """The files of one checkpoint. A data rank's file is at its rank in a list; lists are by pipeline stage."""

    directory: Path
    model: list[Path]
    """Per pipeline stage, what is not sharded."""
    optim: list[list[Path]]
    """Per stage, per data rank: a ZeRO optimizer's shards; no lists where there is none."""
    parts: list[Path]
    """Per data rank at stage 3: which parameters there are, and shards of the frozen ones."""
    layers: dict[int, Path]
    """Of a pipeline: layer -> its tensors."""
    universal: Path | None
    """The folder of whole tensors by name."""


def find(place: Path, tag: str | None) -> Path | None:
    """The directory of the DeepSpeed checkpoint `tag` in `place`, of the latest, or `place` itself; None for others."""
    if not place.is_dir():
        return None
    tags = (
        [tag] if tag is not None else [text for name in ("latest", "latest_universal") if (text := _text(place / name))]
    )
    places = [place / name for name in tags] + ([place] if tag is None else [])
    return next((path for path in places if _is_one(path)), None)


def _text(path: Path) -> str:
    """The tag in `path`, which is one name inside the directory; nothing where it is not that."""
    text = path.read_bytes()[:300].decode(errors="replace").strip() if path.is_file() else ""
    return text if text == Path(text).name else ""


def _is_one(path: Path) -> bool:
    if not path.is_dir() or (path / "index.json").is_file():
        return False
    return any(_MODEL.fullmatch(entry.name) or _MODEL_3.fullmatch(entry.name) for entry in path.iterdir())


def sort_files(directory: Path) -> Files:
    """The files of `directory` by what they are. Raises CheckpointError where a rank's file is missing."""
    names = sorted(entry.name for entry in directory.iterdir())
    expert = next((name for name in names if _EXPERT.fullmatch(name)), None)
    if expert:
        raise CheckpointError(f"{directory} holds experts ({expert}), which this reader does not put together.")
    found = {
        pattern: [m for name in names if (m := pattern.fullmatch(name))]
        for pattern in (_MODEL, _MODEL_3, _OPTIM, _LAYER)
    }
    optim = {(int(m[2]), int(m[1])): directory / m[0] for m in found[_OPTIM]}
    parts = {int(m[1]): directory / m[0] for m in found[_MODEL_3]}
    model = {int(m[1]): directory / m[0] for m in found[_MODEL]}
    stages = max((stage for stage, _ in optim), default=-1) + 1
    shards = {s: {r: path for (stage, r), path in optim.items() if stage == s} for s in range(stages)}
    zero = directory / "zero"
    slices = [m[0] for m in found[_LAYER] if int(m[2] or 0)] + [m[0] for m in found[_MODEL_3] if int(m[2])]
    slices += [m[0] for m in found[_MODEL] if int(m[1]) and not found[_LAYER]]
    if slices and not zero.is_dir():
        raise CheckpointError(
            f"{directory} holds slices of tensors by model-parallel rank ({slices[0]}), which this reader does not put "
            "together. Convert it to a universal checkpoint by DeepSpeed's ds_to_universal, which does, and read that."
        )
    return Files(
        directory=directory,
        model=_in_order(directory, model, "mp_rank"),
        optim=[_in_order(directory, shards[stage], "zero_pp_rank") for stage in range(stages)],
        parts=_in_order(directory, parts, "zero_pp_rank"),
        layers={int(m[1]): directory / m[0] for m in found[_LAYER]},
        universal=zero if zero.is_dir() else None,
    )


def _in_order(directory: Path, numbered: dict[int, Path], what: str) -> list[Path]:
    gone = sorted(set(range(max(numbered, default=-1) + 1)) - numbered.keys())
    if gone:
        raise CheckpointError(
            f"{directory}: the file of {what} {gone[0]} is missing; {len(numbered)} others are there."
        )
    return [numbered[number] for number in sorted(numbered)]


def read_file(path: Path) -> dict[str, Any]:
    """The content of one of DeepSpeed's files."""
    content = read_pickle(path, inert=_INERT)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not what DeepSpeed writes there.")
    return content


def field(holder: Any, name: str, *, path: Path) -> Any:
    """`holder[name]`, or the attribute of a stand-in; CheckpointError where there is none."""
    fields = vars(holder) if isinstance(holder, Inert) else holder
    if not isinstance(fields, dict) or name not in fields:
        raise CheckpointError(f"{path} has no {name!r} where DeepSpeed 0.19 writes it; it was made by another version.")
    return fields[name]
