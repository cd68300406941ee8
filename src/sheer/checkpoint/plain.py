"""Python values as JSON and back, exactly: what `state` and `facts` may hold, and the path of what they may not.

JSON has no tuples and no keys but strings. A tuple is written `{"$tuple": [...]}` and a mapping with other keys
`{"$items": [[key, value], ...]}`, so that what is read back equals what was saved. Infinity and NaN are written as
Python's `json` writes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from sheer.errors import CheckpointError

_TUPLE, _ITEMS = "$tuple", "$items"
_DEEPEST = 100


def encode(value: Any, *, path: str) -> Any:
    """`value` as plain JSON data. `path` names it in the error that a value JSON cannot hold raises."""
    return _encode(value, path, 0)


def _encode(value: Any, path: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise CheckpointError(f"{path[:200]}... is nested more than {_DEEPEST} deep (or holds itself).")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # the text itself, also of a str that is an Enum
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, depth)
    raise CheckpointError(
        f"{path} is {_described(value)}, which JSON cannot hold; a checkpoint stores no pickles. "
        f"Allowed: None, bool, int, float, str, and lists, tuples and dicts of them. {_mend(value)}"
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str | int | float | None):
            raise CheckpointError(f"{path} has the key {key!r} ({type(key).__name__}); a key is a str or a number.")
    items = [(key, _encode(item, f"{path}[{key!r}]", depth + 1)) for key, item in value.items()]
    if all(type(key) is str for key in value) and list(value) not in ([_TUPLE], [_ITEMS]):
        return dict(items)
    return {_ITEMS: [[_encode(key, path, depth + 1), item] for key, item in items]}


def decode(value: Any) -> Any:
    """What `encode` was given. Raises CheckpointError on data that `encode` never makes."""
    try:
        return _decode(value)
    except RecursionError as error:
        raise CheckpointError("the data is nested deeper than any that was ever saved.") from error


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if list(value) == [_TUPLE] and isinstance(value[_TUPLE], list):
        return tuple(_decode(item) for item in value[_TUPLE])
    if list(value) == [_ITEMS] and isinstance(value[_ITEMS], list):
        return dict(_decode_item(item) for item in value[_ITEMS])
    return {key: _decode(item) for key, item in value.items()}


def _decode_item(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2 or isinstance(item[0], list | dict):
        raise CheckpointError(f"an item of a mapping is not a [key, value] pair: {item!r:.100}.")
    return item[0], _decode(item[1])


def parse(text: bytes, *, what: str) -> Any:
    """JSON data from `text`. Duplicate keys, bad JSON and bottomless nesting raise a CheckpointError about `what`."""
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid: {error}.") from error


def render(value: Any) -> str:
    """Compact JSON, ASCII only."""
    return json.dumps(value, separators=(",", ":"))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r:.100} is there twice")
    return made


def _described(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{kind} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{kind} ({value!r:.60})"


def _mend(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "Save `.item()` or `.tolist()`, or make it a buffer of the module."
    return "Convert it first."
