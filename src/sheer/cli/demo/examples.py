"""Finds the example scripts: inside the installed package, or beside `src/` in a source checkout."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import sheer
from sheer.errors import UsageError


def folder() -> Path:
    """The folder that holds the examples."""
    package = Path(sheer.__file__).resolve().parent
    for place in (package / "examples", package.parents[1] / "examples"):
        if (place / "gpt.py").is_file():
            return place
    raise UsageError(f"the examples are neither in {package} nor beside its source; install sheer again")


def load(name: str) -> ModuleType:
    """The example `name` as a module, imported from its file."""
    known_as = f"sheer_example_{name}"
    if known_as in sys.modules:
        return sys.modules[known_as]
    spec = importlib.util.spec_from_file_location(known_as, folder() / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and torch.compile look a module up by its name while it is being executed.
    sys.modules[known_as] = module
    spec.loader.exec_module(module)
    return module
