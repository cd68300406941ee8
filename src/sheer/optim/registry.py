"""Optimizers by name: DeepSpeed's names, any class of torch.optim, or an import path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from sheer.errors import ConfigError, did_you_mean
from sheer.optim.lion import Lion
from sheer.optim.named import check_params, import_object, without_auto


class OptimizerRecipe(NamedTuple):
    """How to build an optimizer: `recipe.cls(params, **recipe.kwargs)`."""

    cls: type[Optimizer]
    kwargs: dict[str, Any]


# torch's classes whose fused kernel exists on every device type torch trains on (Adagrad's: CPU and CUDA only). SGD's
# fails where some parameters have momentum and others have none yet, as after unfreezing (torch 2.13: a TypeError).
_FUSED = frozenset({"Adam", "AdamW"})

# Parameters by which a user chooses the implementation.
_IMPLEMENTATION = frozenset({"fused", "foreach", "differentiable", "capturable"})

_CANNOT_WORK = {
    "LBFGS": "it evaluates the loss again inside its step, by a closure, and the engine has none to give",
    "SparseAdam": "it takes sparse gradients only, and the engine's gradients are dense",
    "Adafactor": "it needs each parameter's shape and norm, and the engine updates flat pieces of parameters",
}

_NOT_BUILT = {
    "lamb": "its trust ratio needs each parameter's norm",
    "onebitadam": "compressed communication is not built",
    "onebitlamb": "compressed communication is not built",
    "zerooneadam": "compressed communication is not built",
    "muadam": "it needs the mup package; give its class by import path, with parameter groups made by mup",
    "muadamw": "it needs the mup package; give its class by import path, with parameter groups made by mup",
    "musgd": "it needs the mup package; give its class by import path, with parameter groups made by mup",
}

# Classes of DeepSpeed's that are another implementation of what torch has, fused where the device has a kernel for it.
_OTHERWISE_NAMED = {
    "fusedadam": "AdamW",
    "deepspeedcpuadam": "AdamW",
    "cpuadam": "AdamW",
    "fusedlion": "Lion",
    "deepspeedcpulion": "Lion",
    "cpulion": "Lion",
    "deepspeedcpuadagrad": "Adagrad",
    "cpuadagrad": "Adagrad",
}


class _Switch(NamedTuple):
    """A parameter of DeepSpeed's optimizers that torch's lack: what it may be, and what to do otherwise."""

    allowed: tuple[Any, ...]
    otherwise: str


_SWITCHES = {
    "torch_adam": _Switch((True, False), "it is without effect: Adam is torch's in any case"),
    "bias_correction": _Switch((True,), "torch's Adam always corrects the bias"),
    "set_grad_none": _Switch((True,), "gradients are always dropped after a step"),
    "fp32_optimizer_states": _Switch((True,), "optimizer state follows the master weights; see data_types and bf16"),
}


def optimizer_factory(type_name: str, params: Mapping[str, Any]) -> OptimizerRecipe:
    """The optimizer a config's `optimizer` section names, ready to be built over the engine's tensors.

    Names are case-insensitive. "Adam" is `torch.optim.Adam` (L2 decay, as in PyTorch) unless `adam_w_mode` is true.
    torch's fused kernel is used where every device type has one, its foreach form elsewhere, unless the user chose.
    Parameters left at "auto" take their defaults. ConfigError, naming the key, for a name, parameter or value that is
    not known, and for optimizers that cannot work on the engine's flat pieces, with the reason.
    """
    cls = _find(type_name)
    given = without_auto(params)
    cls = _adam_or_adamw(type_name, cls, given)
    _drop_switches(cls, given)
    if "max_grad_norm" in given:
        raise ConfigError(
            f"optimizer.params.max_grad_norm={given['max_grad_norm']!r}: clipping belongs to the engine. Set the "
            "top-level key gradient_clipping to this value and remove it here."
        )
    check_params(cls, given, key="optimizer.params", reserved=frozenset({"params"}))
    kwargs = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if cls.__module__.startswith("torch.optim") and not _IMPLEMENTATION & kwargs.keys():
        kwargs |= _implementation(cls)
    _try_out(cls, kwargs)
    return OptimizerRecipe(cls, kwargs)


def _find(type_name: str) -> type[Optimizer]:
    if "." in type_name:
        cls = import_object(type_name, key="optimizer.type")
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
            raise ConfigError(f"optimizer.type={type_name!r} is not a subclass of torch.optim.Optimizer, but {cls!r}.")
        _refuse(cls.__name__ if cls.__module__.startswith("torch.optim") else "", type_name)
        return cls
    known = _known()
    by_folded = {name.lower(): name for name in known}
    usable = ", ".join(sorted(known.keys() - _CANNOT_WORK))
    folded = type_name.lower().replace("_", "")
    if folded in _NOT_BUILT:
        raise ConfigError(
            f"optimizer.type={type_name!r} is DeepSpeed's, and not available here: {_NOT_BUILT[folded]}. Available are "
            f"{usable}, or an import path 'package.module.Name'."
        )
    if folded in _OTHERWISE_NAMED:
        raise ConfigError(
            f"optimizer.type={type_name!r} is a class of DeepSpeed's: its type is {_OTHERWISE_NAMED[folded]!r}, by "
            "torch, the fused kernel where there is one; zero_optimization.offload_optimizer says where it runs."
        )
    if folded not in by_folded:
        raise ConfigError(
            f"optimizer.type={type_name!r} is not known. Allowed are {usable}, or an import path 'package.module.Name'."
            f"{did_you_mean(type_name, known)}"
        )
    name = by_folded[folded]
    _refuse(name, type_name)
    return known[name]


def _known() -> dict[str, type[Optimizer]]:
    classes: dict[str, type[Optimizer]] = {
        name: one
        for name, one in vars(torch.optim).items()
        if isinstance(one, type) and issubclass(one, Optimizer) and one is not Optimizer
    }
    return classes | {"Lion": Lion}


def _refuse(name: str, type_name: str) -> None:
    if name in _CANNOT_WORK:
        raise ConfigError(
            f"optimizer.type={type_name!r} cannot be used: {_CANNOT_WORK[name]}. Use an elementwise optimizer, such as "
            "AdamW, SGD or Lion."
        )


def _adam_or_adamw(type_name: str, cls: type[Optimizer], given: dict[str, Any]) -> type[Optimizer]:
    """Take `adam_w_mode` out of `given` and follow it."""
    if cls not in (torch.optim.Adam, torch.optim.AdamW) or "adam_w_mode" not in given:
        return cls
    decoupled = given.pop("adam_w_mode")
    if type(decoupled) is not bool:
        raise ConfigError(f"optimizer.params.adam_w_mode={decoupled!r}: true or false is needed.")
    if cls is torch.optim.AdamW:
        if not decoupled:
            raise ConfigError(
                f"optimizer.params.adam_w_mode=False contradicts optimizer.type={type_name!r}. Use type 'Adam' for L2 "
                "decay, or remove adam_w_mode."
            )
        return cls
    if decoupled:
        # The user named Adam, whose weight decay is 0 unless given; AdamW's is 0.01.
        given.setdefault("weight_decay", 0.0)
        return torch.optim.AdamW
    return cls


def _drop_switches(cls: type[Optimizer], given: dict[str, Any]) -> None:
    """Take DeepSpeed's own switches out of `given` where they ask for what happens anyway."""
    own = inspect.signature(cls).parameters
    for name in _SWITCHES.keys() & given.keys() - own.keys():
        switch, value = _SWITCHES[name], given.pop(name)
        if value not in switch.allowed:
            raise ConfigError(
                f"optimizer.params.{name}={value!r}: only {' or '.join(map(repr, switch.allowed))} is possible; "
                f"{switch.otherwise}. Remove the key."
            )


def _implementation(cls: type[Optimizer]) -> dict[str, bool]:
    accepted = inspect.signature(cls).parameters
    if cls.__name__ in _FUSED:
        return {"fused": True}
    return {"foreach": True} if "foreach" in accepted else {}


def _try_out(cls: type[Optimizer], kwargs: dict[str, Any]) -> None:
    """Build torch's or our own class once over a tiny parameter, so that a bad value is reported by its config key.

    A user's class is not tried out: its constructor may have effects.
    """
    if cls is not Lion and not cls.__module__.startswith("torch.optim"):
        return
    try:
        cls([torch.zeros(1, 1, requires_grad=True)], **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer.params: {cls.__name__} cannot be built with {kwargs}: {error}") from error
