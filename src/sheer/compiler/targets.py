"""Which modules are compiled: the repeated blocks, the whole module, or what a list of names and globs picks."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from sheer.errors import ConfigError, did_you_mean

Scope = Literal["auto", "module"] | Sequence[str]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NOT_CALLABLE = nn.Module.forward


def find_blocks(module: nn.Module) -> tuple[str, ...]:
    """FQNs of the repeated blocks of `module`, in the order of its modules; `("",)`, the whole module, if none repeat.

    A block is one of two or more children of one `ModuleList`, `Sequential` or `ModuleDict`, or of any module that
    names them by numbers as these do (a stage of a pipeline), that have the same class and parameters. The outermost
    repetition wins. Bare containers and the single layers of `torch.nn` (two `Linear` in one `Sequential`) are no
    blocks: compiling them one by one would gain nothing.
    """
    found: list[str] = []
    seen: set[int] = set()

    def walk(parent: nn.Module, prefix: str) -> None:
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        listed = children if isinstance(parent, _CONTAINERS) else [(n, child) for n, child in children if n.isdigit()]
        repeated = _repeated_classes(listed)
        for name, child in children:
            if id(child) in seen:  # one module at several places counts at each, and is named once
                continue
            seen.add(id(child))
            if type(child) in repeated and (name, child) in listed:
                found.append(prefix + name)
            else:
                walk(child, f"{prefix}{name}.")

    walk(module, "")
    return tuple(found) or ("",)


def compiled_by_user(module: nn.Module) -> tuple[str, ...]:
    """FQNs of the modules whose call or forward the user has compiled: nothing can be done around what is inside."""
    return tuple(
        fqn
        for fqn, found in module.named_modules()
        if found.__dict__.get("_compiled_call_impl") is not None
        or hasattr(getattr(found, "forward", None), "_torchdynamo_orig_callable")
    )


def choose(module: nn.Module, *, scope: Scope) -> tuple[str, ...]:
    """The FQNs that `scope` names, outermost only: what lies inside another target is compiled as a part of it.

    Raises:
        ConfigError: `scope` is no known word, a name matches nothing, or only matches modules without a `forward`.
    """
    if scope == "auto":
        return find_blocks(module)
    if scope == "module":
        return ("",)
    if isinstance(scope, str):
        raise ConfigError(
            f"compile.scope is {scope!r}; allowed are 'auto', 'module', or a list of class names and FQN globs"
            f" such as [{scope!r}].{did_you_mean(scope, ['auto', 'module'])}"
        )
    wanted = set(pick(module, scope, key="compile.scope"))
    if not wanted:
        raise ConfigError("compile.scope is an empty list; name at least one class or FQN glob, or use 'auto'")
    # A module at two places counts as inside others only where both places are: it is called at each.
    outer: dict[int, str] = {}
    for fqn, found in modules_by_name(module).items():
        if fqn in wanted and not _lies_inside(fqn, wanted):
            outer.setdefault(id(found), fqn)
    return tuple(outer.values())


def pick(module: nn.Module, patterns: Sequence[str], *, key: str) -> tuple[str, ...]:
    """The FQNs of all callable modules that `patterns` (class names and FQN globs) match, one inside another too.

    Raises:
        ConfigError: one matches nothing, or only modules without a `forward`; it names `key`.
    """
    return tuple(dict.fromkeys(fqn for pattern in patterns for fqn in _matches(module, pattern, key)))


def modules_by_name(module: nn.Module) -> dict[str, nn.Module]:
    """All modules, each under all of its names."""
    return dict(module.named_modules(remove_duplicate=False))


def _repeated_classes(children: list[tuple[str, nn.Module]]) -> set[type[nn.Module]]:
    """Classes that two or more of `children` share and that are worth a graph of their own."""
    classes = [type(child) for _, child in children if _is_block_like(child)]
    return {cls for cls in classes if classes.count(cls) > 1}


def _is_block_like(module: nn.Module) -> bool:
    cls = type(module)
    native_layer = cls.__module__.startswith("torch.nn.") and not any(True for _ in module.children())
    has_parameters = any(True for _ in module.parameters())
    return has_parameters and not native_layer and cls not in _CONTAINERS


def _matches(module: nn.Module, pattern: str, key: str) -> list[str]:
    """FQNs of the callable modules whose class is called `pattern`, or whose FQN it matches as a glob."""
    hits = [
        (fqn, found)
        for fqn, found in modules_by_name(module).items()
        if type(found).__name__ == pattern or fnmatchcase(fqn, pattern)
    ]
    callable_hits = [fqn for fqn, found in hits if type(found).forward is not _NOT_CALLABLE]
    if callable_hits:
        return callable_hits
    if hits:
        raise ConfigError(
            f"{key}: {pattern!r} only matches {hits[0][0]!r}, a {type(hits[0][1]).__name__}, which has no"
            f" forward; name its children, for example {hits[0][0] + '.*'!r}"
        )
    known = {type(found).__name__ for found in module.modules()} | {fqn for fqn in modules_by_name(module) if fqn}
    raise ConfigError(
        f"{key}: {pattern!r} matches no class name and no module name of {type(module).__name__}."
        f"{did_you_mean(pattern, sorted(known))}"
    )


def _lies_inside(fqn: str, wanted: set[str]) -> bool:
    """Whether an ancestor of `fqn` is in `wanted`."""
    if fqn == "":
        return False
    parts = fqn.split(".")
    return "" in wanted or any(".".join(parts[:depth]) in wanted for depth in range(1, len(parts)))
