"""From `compile.backend` and `compile.kwargs` to something `torch.compile` takes, checked before training starts."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.eval_frame import reset_code

from sheer.errors import CompileError, ConfigError, did_you_mean

Backend = str | Callable[..., Any]
CompilerFn = Callable[[Callable[..., Any]], Callable[..., Any]]

# What `torch.compile` takes beside these is the user's to set; these are given by other keys or by us.
_NOT_KWARGS = {"model", "backend", "isolate_recompiles"}

# Torch's own; to list the others, torch imports every one of them, for half a second.
_ALWAYS_THERE = frozenset({"inductor", "eager", "aot_eager"})


class Settings(NamedTuple):
    """How forwards are compiled."""

    backend: Backend
    """As `resolve` gives it."""
    kwargs: Mapping[str, object]
    """For `torch.compile`."""
    compiler_fn: CompilerFn | None = None
    """In the place of `torch.compile`, from a forward (the module is its first argument) to what is called instead."""

    @property
    def disabled(self) -> bool:
        """Whether `kwargs` say that nothing is to be compiled."""
        return bool(self.kwargs.get("disable"))


def resolve(backend: Backend) -> Backend:
    """A torch backend's name as it is, an import path `pkg.mod.fn` as the callable it names, a callable as it is.

    Raises:
        ConfigError: no such torch backend, or the import path leads to nothing that can be called.
    """
    if not isinstance(backend, str):
        if callable(backend):
            return backend
        raise ConfigError(f"compile.backend is {backend!r}; allowed are a name, an import path or a callable")
    if backend in _ALWAYS_THERE:
        return backend
    names = torch._dynamo.list_backends(exclude_tags=())
    if backend in names:
        return backend
    if "." in backend:
        return _import(backend)
    raise ConfigError(
        f"compile.backend is {backend!r}, which torch does not have.{did_you_mean(backend, names)}"
        f" Allowed are {', '.join(names)}, or an import path such as 'package.module.function'."
    )


def check_kwargs(kwargs: Mapping[str, object]) -> None:
    """Raise `ConfigError` for a key that `torch.compile` does not take or that has a place of its own."""
    known = sorted(set(inspect.signature(torch.compile).parameters) - _NOT_KWARGS)
    if "backend" in kwargs:
        raise ConfigError(f"compile.kwargs.backend is {kwargs['backend']!r}: give it as compile.backend instead")
    for key in kwargs:
        if key not in known:
            raise ConfigError(
                f"compile.kwargs.{key} is no argument of torch.compile.{did_you_mean(key, known)}"
                f" Allowed are {', '.join(known)}."
            )


def check_backend(
    backend: Backend, *, kwargs: Mapping[str, object] | None = None, device: torch.device | None = None
) -> None:
    """Make sure, before training, that `backend` can compile on this machine, by compiling `x + 1` with it on `device`.

    A backend of the user's own is only looked up: it may count or keep the graphs it sees, and this is none of theirs.

    Raises:
        ConfigError: the name, the import path or an argument is wrong.
        CompileError: the backend does not work here; says what to install or which backend to choose.
    """
    found = resolve(backend)
    if not isinstance(found, str):
        return
    if found == "inductor":
        _check_options((kwargs or {}).get("options") or {})
    probe = types.FunctionType(_probe.__code__.replace(), _probe.__globals__)
    try:
        compiled = torch_compile(probe, backend=found, kwargs=kwargs or {})
    except Exception as error:
        raise ConfigError(f"compile.kwargs is {dict(kwargs or {})!r}, which torch.compile refuses: {error}") from error
    try:
        with torch.no_grad():
            compiled(torch.ones(2, device=device))
    except Exception as error:
        raise CompileError(_why(found, error)) from error
    finally:
        reset_code(probe.__code__)


def _check_options(options: Any) -> None:
    """Raise `ConfigError` for an option that inductor does not have, by name; torch would list all it has."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"compile.kwargs.options is {options!r}; it must be an object, option to value")
    known = torch._inductor.list_options()
    for key in options:
        if key.replace("-", "_") not in known and key != "guard_filter_fn":
            raise ConfigError(
                f"compile.kwargs.options.{key} is no option of inductor.{did_you_mean(key, known)}"
                " torch._inductor.list_options() lists them."
            )


def compile_function(function: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """`function`, compiled as `settings` say.

    Raises:
        CompileError: `compiler_fn` gave nothing that can be called.
    """
    if settings.compiler_fn is None:
        return torch_compile(function, backend=settings.backend, kwargs=settings.kwargs)
    compiled = settings.compiler_fn(function)
    if not callable(compiled):
        raise CompileError(
            f"compiler_fn gave {compiled!r}, which cannot be called; it takes a forward function and gives what to call"
            " in its place, such as `lambda forward: torch.compile(forward)`"
        )
    return compiled


def torch_compile(
    function: Callable[..., Any], *, backend: Backend, kwargs: Mapping[str, object]
) -> Callable[..., Any]:
    """`torch.compile` with its recompiles counted apart from everybody else's."""
    compile_any: Any = torch.compile  # its typed overloads lack isolate_recompiles
    compiled: Callable[..., Any] = compile_any(function, backend=backend, isolate_recompiles=True, **_own(kwargs))
    return compiled


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _own(kwargs: Mapping[str, object]) -> dict[str, Any]:
    """A copy to hand over: torch takes entries out of the `options` it is given."""
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in kwargs.items()}


def _import(path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"compile.backend is {path!r}: importing {module_name!r} failed with {type(error).__name__}: {error}."
            " It must be an import path 'package.module.function' that this process can import."
        ) from error
    function = getattr(module, attribute, None)
    if function is None:
        raise ConfigError(
            f"compile.backend is {path!r}: {module_name!r} has no {attribute!r}.{did_you_mean(attribute, dir(module))}"
        )
    if not callable(function):
        raise ConfigError(f"compile.backend is {path!r}: a {type(function).__name__}, which cannot be called")
    found: Callable[..., Any] = function
    return found


def _why(backend: str, error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    message = f"compile.backend {backend!r} does not work on this machine: {first_line}"
    if "C++" in first_line or "InvalidCxxCompiler" in first_line:
        message += (
            ". Install a C++ compiler (Debian: `apt install g++`; conda: `conda install gxx`; or point CXX at one)"
        )
    return f'{message}. Or choose "backend": "aot_eager" (no code generation), or "enabled": false.'
