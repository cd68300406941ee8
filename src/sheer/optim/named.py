"""What optimizers and schedules by name share: finding a class by import path, and checking a config's parameters."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sheer.errors import ConfigError, did_you_mean

AUTO = "auto"
"""The value by which a config leaves a parameter to whoever fills it in; still here means: take the default."""

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Annotations that call for a number; strings where a module postpones them.
_NUMBERS = (int, float, "int", "float")


def without_auto(params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` without those left at "auto"."""
    return {name: value for name, value in params.items() if not (isinstance(value, str) and value == AUTO)}


def import_object(path: str, *, key: str) -> Any:
    """The object at import path "package.module.Name". ConfigError (naming config `key`) when it is not there."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key}={path!r}: cannot import module {module_name!r} ({error}). Give an importable path "
            "'package.module.Name'; the module must be installed or on PYTHONPATH."
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        classes = [one for one, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(f"{key}={path!r}: module {module_name!r} has no class {name!r}.{did_you_mean(name, classes)}")
    return found


def check_params(target: Callable[..., Any], params: Mapping[str, Any], *, key: str, reserved: frozenset[str]) -> None:
    """Check that `target` can be called with `params` besides its first argument.

    `key` is their place in the config, `reserved` names what the engine passes itself. ConfigError for an unknown
    name, a required one that is missing, or a value of another type than the default's.
    """
    declared = list(inspect.signature(target).parameters.values())[1:]
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in declared):
        return
    allowed = {one.name: one for one in declared if one.name not in reserved and one.kind in _BY_NAME}
    name_of_target = getattr(target, "__name__", str(target))
    for name, value in params.items():
        if name not in allowed:
            raise ConfigError(
                f"{key}.{name}={value!r}: {name_of_target} has no parameter {name!r}. Allowed are "
                f"{', '.join(sorted(allowed))}.{did_you_mean(name, allowed)}"
            )
        _check_type(value, allowed[name], key=f"{key}.{name}")
    missing = [one.name for one in allowed.values() if one.default is one.empty and one.name not in params]
    if missing:
        raise ConfigError(f"{key}: {name_of_target} needs {', '.join(missing)}; given are {sorted(params) or 'none'}.")


def _check_type(value: Any, declared: inspect.Parameter, *, key: str) -> None:
    """Compare with the default's type: the commonest slip is a number in quotes, which torch reports obscurely."""
    default, wanted = declared.default, ""
    is_number = declared.annotation in _NUMBERS or type(default) in (int, float)
    if type(default) is bool and type(value) is not bool:
        wanted = "true or false"
    elif is_number and not _number_like(value):
        wanted = "a number"
    elif type(default) is tuple and not (_listed(value) and len(value) == len(default)):
        wanted = f"a list of {len(default)} numbers"
    if wanted:
        told = "" if default is declared.empty else f"; the default is {default!r}"
        raise ConfigError(f"{key}={value!r}: {wanted} is needed{told}.")


def _number_like(value: Any) -> bool:
    """A number, a tensor (an lr on the device), or a list of numbers (one per parameter group)."""
    if _listed(value):
        return all(_number_like(entry) for entry in value)
    return isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple)
