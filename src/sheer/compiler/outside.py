"""What of a model is not part of any graph: users' hooks, other ways in, and modules outside the targets."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from sheer.compiler.records import Group, Place, place_of_code

_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}


class Hook(NamedTuple):
    """A hook on a module."""

    module: str
    kind: str
    name: str
    place: Place | None
    inner: bool
    """Whether it is on a module inside a target, which therefore runs eagerly; else it runs around the graph."""


class Entry(NamedTuple):
    """A way to run a class's code past its graphs."""

    kind: str
    """The class."""
    name: str
    place: Place
    note: str


class Piece(NamedTuple):
    """A module that no target takes in; it always runs eagerly."""

    module: str
    kind: str
    parameters: int


class Outside(NamedTuple):
    """All that is outside."""

    hooks: tuple[Hook, ...] = ()
    entries: tuple[Entry, ...] = ()
    pieces: tuple[Piece, ...] = ()


def survey(model: nn.Module, targets: tuple[str, ...]) -> Outside:
    """Look at `model` as it is now."""
    chosen = set(targets)
    return Outside(
        hooks=tuple(_hooks(model, chosen)),
        entries=tuple(_entries(model, chosen)),
        pieces=tuple(_pieces(model, "", chosen)),
    )


def group_of(module: nn.Module, targets: tuple[str, ...]) -> Group:
    """The group of `targets`, of which `module` is the first."""
    forward = _function_behind(module.forward)
    return Group(type(module).__name__, None if forward is None else _place_of(forward), targets)


def _place_of(function: types.FunctionType) -> Place:
    """Where the function itself begins, below decorators that say what they wrap."""
    inner = inspect.unwrap(function)
    code = inner.__code__ if isinstance(inner, types.FunctionType) else function.__code__
    return place_of_code(code, name=function.__qualname__)


def _hooks(model: nn.Module, targets: set[str]) -> Iterator[Hook]:
    for fqn, module in model.named_modules():
        inner = fqn not in targets and _is_inside(fqn, targets)
        for attribute, kind in _HOOKS.items():
            for hook in module.__dict__[attribute].values():
                function = _function_behind(hook)
                place = None if function is None else _place_of(function)
                yield Hook(fqn, kind, place.function if place else type(hook).__name__, place, inner)


def _entries(model: nn.Module, targets: set[str]) -> Iterator[Entry]:
    """Per class: `forward` called directly, a `__call__` of its own, and other public methods (the model's too)."""
    seen: set[type[nn.Module]] = set()
    for fqn, module in model.named_modules():
        cls = type(module)
        if cls in seen or (fqn != "" and fqn not in targets) or cls.__module__.startswith("torch.nn."):
            continue
        seen.add(cls)
        own = {name: value for name, value in vars(cls).items() if isinstance(value, types.FunctionType)}
        if fqn in targets and "forward" in own:
            yield Entry(cls.__name__, "forward", _place_of(own["forward"]), _DIRECT)
        if fqn in targets and "__call__" in own:
            yield Entry(cls.__name__, "__call__", _place_of(own["__call__"]), _OWN_CALL)
        for name, function in own.items():
            if not name.startswith("_") and name != "forward":
                yield Entry(cls.__name__, name, _place_of(function), _METHOD)


_DIRECT = "module.forward(...) called directly runs eagerly; module(...) is compiled"
_OWN_CALL = "runs around the graph if it calls super().__call__, and past it otherwise"
_METHOD = "runs as plain Python; calls of targets inside it are compiled"


def _pieces(module: nn.Module, fqn: str, targets: set[str]) -> Iterator[Piece]:
    """The largest modules with parameters that neither are, hold, nor lie in a target."""
    if fqn in targets:
        return
    if any(target.startswith(fqn + ".") for target in targets) or fqn == "":
        for name, child in module.named_children():
            yield from _pieces(child, f"{fqn}.{name}" if fqn else name, targets)
        return
    parameters = sum(p.numel() for p in module.parameters())
    if parameters:
        yield Piece(fqn, type(module).__name__, parameters)


def _is_inside(fqn: str, targets: set[str]) -> bool:
    """Whether an ancestor of `fqn` is a target."""
    return fqn != "" and any(not target or fqn.startswith(target + ".") for target in targets)


def _function_behind(callback: Callable[..., Any]) -> types.FunctionType | None:
    """The Python function that a hook ends in: bound methods and `functools.partial` opened; None for other objects."""
    inner: Any = callback
    while not isinstance(inner, types.FunctionType):
        if isinstance(inner, types.MethodType):
            inner = inner.__func__
        elif (wrapped := getattr(inner, "func", None)) is not None:
            inner = wrapped
        else:
            return None
    return inner
