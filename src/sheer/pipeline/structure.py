"""What may travel between stages: nested structures of tensors, as a description in JSON and a list of raw tensors.

Nothing is pickled. A class (a named tuple, a dataclass) travels as the name under which the receiver imports it.
"""

from __future__ import annotations

import importlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch

from sheer.errors import DataError

Make = Callable[[Any, Sequence[torch.Tensor]], Any]

ALLOWED = (
    "tensors, tuples, lists, dicts, named tuples, dataclasses, None, bool, int, float and str travel between stages"
)


class TensorSpec(NamedTuple):
    """What a receiver must know of a tensor before it comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    wants_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


class Blueprint(NamedTuple):
    """A structure without the contents of its tensors; numbers in `tree` are places in `tensors`."""

    tree: Any
    tensors: tuple[TensorSpec, ...]

    def to_bytes(self) -> bytes:
        """As it travels."""
        specs = [[str(s.dtype).removeprefix("torch."), s.shape, s.wants_grad] for s in self.tensors]
        return json.dumps([self.tree, specs], separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Blueprint:
        """What `to_bytes` gave."""
        tree, specs = json.loads(data)
        return Blueprint(tree, tuple(TensorSpec(getattr(torch, d), tuple(shape), wants) for d, shape, wants in specs))

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The structure with these tensors in it."""
        return _build(self.tree, tensors)


class Packed(NamedTuple):
    """A structure taken apart; a tensor that is in it twice is in `tensors` once."""

    blueprint: Blueprint
    tensors: tuple[torch.Tensor, ...]


def pack(value: Any, *, what: str) -> Packed:
    """Take `value` apart. DataError names what cannot travel and where in `value` (called `what`) it is."""
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}

    def place(tensor: torch.Tensor, path: str) -> int:
        if id(tensor) not in places:
            _check_tensor(tensor, path)
            places[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return places[id(tensor)]

    tree = _tree(value, what, place)
    specs = tuple(TensorSpec(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors)
    return Packed(Blueprint(tree, specs), tuple(tensors))


def _check_tensor(tensor: torch.Tensor, path: str) -> None:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise DataError(
            f"{path} is a {type(tensor).__name__} of layout {tensor.layout}: only plain dense tensors travel between "
            "stages; make it one in the layer that returns it, and again what it was in the next layer"
        )


# --- taking apart ---------------------------------------------------------------------------------------------------


def _tree(value: Any, path: str, place: Callable[[torch.Tensor, str], int]) -> Any:
    """`value` as JSON: a tensor is its place, anything else a list that begins with its kind."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return place(value, path)
    if value is None or kind in (bool, int, float, str):
        return ["value", value]
    if kind in _SEQUENCES:
        items = [_tree(item, f"{path}[{i}]", place) for i, item in enumerate(value)]
        return [_SEQUENCES[kind], items]
    if kind in _MAPPINGS:
        return [_MAPPINGS[kind], _pairs(value, path, place)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["named", _import_name(kind, path), _members(value, value._fields, path, place)]
    if is_dataclass(kind):
        name = _import_name(kind, path)
        if issubclass(kind, dict):  # as transformers' outputs are
            return ["keywords", name, _pairs(value, path, place)]
        present = [field.name for field in fields(value) if hasattr(value, field.name)]
        return ["dataclass", name, _members(value, present, path, place)]
    raise DataError(f"{path} is a {kind.__module__}.{kind.__qualname__}: {ALLOWED}")


_SEQUENCES: dict[type, str] = {tuple: "tuple", list: "list", torch.Size: "size"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered"}


def _pairs(value: Mapping[Any, Any], path: str, place: Callable[[torch.Tensor, str], int]) -> list[Any]:
    for key in value:
        if key is not None and type(key) not in (bool, int, float, str):
            raise DataError(
                f"{path} has the key {key!r}, a {type(key).__name__}: keys of what travels between stages are str, "
                "int, float, bool or None"
            )
    return [[key, _tree(item, f"{path}[{key!r}]", place)] for key, item in value.items()]


def _members(value: Any, names: Sequence[str], path: str, place: Callable[[torch.Tensor, str], int]) -> list[Any]:
    return [[name, _tree(getattr(value, name), f"{path}.{name}", place)] for name in names]


def _import_name(kind: type, path: str) -> list[str]:
    """Where the receiver finds the class; refused where it would not."""
    name = [kind.__module__, kind.__qualname__]
    try:
        found = _imported(name)
    except (ImportError, AttributeError):
        found = None
    if found is not kind:
        raise DataError(
            f"{path} is a {'.'.join(name)}, which the next stage cannot import under that name: define the class "
            "at the top of a module"
        )
    return name


def _imported(name: Sequence[str]) -> Any:
    module, qualified = name
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


# --- putting together -----------------------------------------------------------------------------------------------


def _build(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(tree, int):
        return tensors[tree]
    kind, *rest = tree
    return _BUILDERS[kind](rest, tensors)


def _dict_of(pairs: Sequence[Any], tensors: Sequence[torch.Tensor]) -> dict[Any, Any]:
    return {key: _build(item, tensors) for key, item in pairs}


def _dataclass(rest: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """As it was, frozen or not: `__init__` and `__post_init__` have run where it was made."""
    kind = _imported(rest[0])
    value = object.__new__(kind)
    for name, item in _dict_of(rest[1], tensors).items():
        object.__setattr__(value, name, item)
    return value


_BUILDERS: dict[str, Make] = {
    "value": lambda rest, tensors: rest[0],
    "tuple": lambda rest, tensors: tuple(_build(item, tensors) for item in rest[0]),
    "list": lambda rest, tensors: [_build(item, tensors) for item in rest[0]],
    "size": lambda rest, tensors: torch.Size([_build(item, tensors) for item in rest[0]]),
    "dict": lambda rest, tensors: _dict_of(rest[0], tensors),
    "ordered": lambda rest, tensors: OrderedDict(_dict_of(rest[0], tensors)),
    "named": lambda rest, tensors: _imported(rest[0])._make(_dict_of(rest[1], tensors).values()),
    "keywords": lambda rest, tensors: _imported(rest[0])(**_dict_of(rest[1], tensors)),
    "dataclass": _dataclass,
}
