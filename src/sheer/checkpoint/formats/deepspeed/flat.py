"""DeepSpeed's optimizers keep the masters of a group in one flat tensor and state of the same length; cut by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sheer.checkpoint.formats.deepspeed.files import field, read_file
from sheer.checkpoint.formats.foreign import optimizer_state, whole
from sheer.checkpoint.shard import Shard
from sheer.errors import CheckpointError

Shapes = Sequence[Mapping[str, Sequence[int]]]
"""Per flat tensor: name -> whole shape, in the order in which they lie."""


class Trained:
    """What the optimizer's files hold by name, as it is put together."""

    def __init__(self) -> None:
        self.shards: list[Shard] = []
        self.forms: dict[str, str] = {}
        """State -> how it relates to its parameter."""
        self.settings: list[Mapping[str, Any]] = []
        """The optimizer's groups."""
        self.scaler: Any = None
        self.names: set[str] = set()
        self.groups: dict[str, int] = {}
        """Parameter -> its group."""
        self.unreadable = ""
        """Why the files' optimizer state has no meaning here, if so."""

    def add(self, part: Part, *, master: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Take one part of one parameter out of a flat master and the state that goes with it."""
        name, shape, span = part.name, part.shape, slice(part.low, part.low + part.numel)
        if not part.numel:
            if name not in self.names and not math.prod(shape):
                self.names.add(name)
                self.shards.append(Shard("param", name, shape, 0, master[:0]))
            return
        self.names.add(name)
        self.shards.append(Shard("param", name, shape, part.at, master[span]))
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() >= master.numel():
                self.forms[key] = "element"
                self.shards.append(Shard(f"optim.{key}", name, shape, part.at, value[span]))
            elif part.at == 0:
                self.add_state(key, name, value, shape)

    def add_state(self, key: str, name: str, value: Any, shape: tuple[int, ...]) -> None:
        """Take a state that is one parameter's own."""
        made = optimizer_state(key, name, value, shape)
        if made is not None:
            form, shard = made
            if self.forms.get(key) != "element":  # of a parameter without dimensions the two look alike
                self.forms[key] = form
            self.shards.append(shard)


class Part(NamedTuple):
    """Elements of one parameter in a flat tensor."""

    name: str
    shape: tuple[int, ...]
    at: int
    """The first one's place in the parameter."""
    low: int
    """The first one's place in the flat tensor."""
    numel: int


def read_stage_1_and_2(paths: Sequence[Path], shapes: Mapping[str, Sequence[int]], out: Trained) -> None:
    """Stages 1 and 2: the masters of a group in one flat tensor, of which each rank has a stretch. Each rank's file
    says which names are where in it."""
    done: dict[str, int] = {}
    for path in paths:
        content = field(read_file(path), "optimizer_state_dict", path=path)
        base = field(content, "base_optimizer_state", path=path)
        masters = field(content, "single_partition_of_fp32_groups", path=path)
        named = field(content, "param_slice_mappings", path=path)
        settings = field(base, "param_groups", path=path)
        for group, (master, places) in enumerate(zip(masters, named, strict=True)):
            state = _state(base, settings[group]["params"][0], settings[group])
            for name, place in places.items():
                low, count = field(place, "start", path=path), field(place, "numel", path=path)
                shape = tuple(shapes[name])
                part = Part(name, shape, done.get(name, 0), low, count)
                out.add(part, master=master, state=state)
                out.groups[name] = group
                done[name] = part.at + count
        out.settings, out.scaler = settings, content.get("loss_scaler")


def read_stage_3(paths: Sequence[Path], shapes: Shapes, out: Trained) -> None:
    """Stage 3: each parameter is cut into equal parts, one for every rank; a rank's parts lie one behind the other, in
    one flat tensor per group of `shapes` (a large optimizer group is several of these)."""
    for rank, path in enumerate(paths):
        content = field(read_file(path), "optimizer_state_dict", path=path)
        inner = field(content, "optimizer_state_dict", path=path)
        masters = field(content, "fp32_flat_groups", path=path)
        out.settings = field(inner, "param_groups", path=path)
        home = {number: at for at, group in enumerate(out.settings) for number in group["params"]}
        for number, (master, named) in enumerate(zip(masters, shapes, strict=True)):
            low = 0
            for name, size in named.items():
                part = _cut(name, size, rank=rank, ranks=len(paths), low=low)
                out.add(part, master=master, state=_state(inner, number, out.settings[home[number]]))
                out.groups[name] = home[number]
                low += _each(size, len(paths))
            if low != master.numel():
                raise CheckpointError(f"{path}: a flat tensor has {master.numel()} elements, its names have {low}.")
        out.scaler = content.get("loss_scaler")


def read_frozen(paths: Sequence[Path], out: Trained) -> None:
    """Stage 3: what is not trained is cut in the same way, and lies by name in the other file of each rank."""
    for rank, path in enumerate(paths):
        content = read_file(path)
        shapes, parts = (content.get(key) or {} for key in ("frozen_param_shapes", "frozen_param_fragments"))
        for name in parts.keys() & shapes.keys():
            part = _cut(name, shapes[name], rank=rank, ranks=len(paths), low=0)
            out.add(part, master=parts[name], state={})


def _each(size: Sequence[int], ranks: int) -> int:
    """Elements of each of the equal parts of a parameter, padding included."""
    return -(-math.prod(size) // ranks)


def _cut(name: str, size: Sequence[int], *, rank: int, ranks: int, low: int) -> Part:
    """The part of one rank, at `low` in its flat tensor."""
    numel, each = math.prod(size), _each(size, ranks)
    at = min(rank * each, numel)
    return Part(name, tuple(size), at, low, min(each, numel - at))


def read_by_memory(content: Mapping[str, Any], held: Mapping[str, torch.Tensor], out: Trained) -> None:
    """Stage 0 with an optimizer of DeepSpeed's own: a flat master per group, and of the parameters, which are views of
    as long a tensor in low precision, the values that say which master it is, and the offsets in it."""
    inner = content["optimizer_state_dict"]
    out.settings, out.scaler = inner["param_groups"], content if "cur_scale" in content else None
    views: dict[int, list[str]] = {}
    for name, tensor in held.items():
        views.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for group, (settings, master) in enumerate(zip(out.settings, content["fp32_groups_flat"], strict=True)):
        named = next((names for names in views.values() if _is_whole(held[names[0]], master)), None)
        if named is None:
            raise CheckpointError("no parameters have the values of one of the optimizer's masters; a file is damaged.")
        for name in named:
            part = Part(name, tuple(held[name].shape), 0, int(held[name].storage_offset()), held[name].numel())
            out.add(part, master=master, state=_state(inner, settings["params"][0], settings))
            out.groups[name] = group


def _is_whole(view: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether what `view` is a part of is `master`, rounded."""
    numel = view.untyped_storage().nbytes() // view.dtype.itemsize
    return numel == master.numel() and torch.equal(view.as_strided((numel,), (1,), 0), master.to(view.dtype))


def _state(content: Mapping[str, Any], number: int, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The states of one tensor of an optimizer; some of DeepSpeed's optimizers count steps by group."""
    state: Mapping[str, Any] = content["state"].get(number, {})
    return {"step": settings["step"], **state} if state and "step" in settings else state


def read_by_number(
    content: Mapping[str, Any], names: Sequence[Sequence[str]], held: Mapping[str, torch.Tensor], out: Trained
) -> None:
    """Stage 0: a state dict of the optimizer, whose parameters are numbered in the order of its groups."""
    inner = content.get("optimizer_state_dict", content)
    out.settings, out.scaler = inner["param_groups"], content if "cur_scale" in content else None
    masters = content.get("fp32_groups", [[None] * len(group) for group in names])
    for at, (settings, group, values) in enumerate(zip(out.settings, names, masters, strict=True)):
        for number, name, master in zip(settings["params"], group, values, strict=True):
            out.groups[name] = at
            shape = tuple(held[name].shape)
            if master is not None:
                out.names.add(name)
                out.shards.append(whole("param", name, master))
            for key, value in _state(inner, number, settings).items():
                out.add_state(key, name, value, shape)
