"""Sheer: a training engine for PyTorch that shards, compiles and checkpoints your module itself, never a wrapper of it.

Public names are loaded when they are first used, so that importing costs little and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sheer import checkpoint, pipe, testing, utils, zero
    from sheer.config import Config
    from sheer.data import RepeatingLoader
    from sheer.engine import Engine
    from sheer.errors import (
        CheckpointError,
        CommError,
        CompileError,
        ConfigError,
        DataError,
        SheerError,
        TornLoadError,
        UsageError,
    )
    from sheer.observe import StepResult
    from sheer.offloading import OffloadStateTypeEnum
    from sheer.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
    from sheer.setup import add_config_arguments, init_distributed, initialize

__all__ = [
    "CheckpointError",
    "CommError",
    "CompileError",
    "Config",
    "ConfigError",
    "DataError",
    "Engine",
    "LayerSpec",
    "OffloadStateTypeEnum",
    "PipelineModule",
    "RepeatingLoader",
    "SheerError",
    "StepResult",
    "TiedLayerSpec",
    "TornLoadError",
    "UsageError",
    "__version__",
    "add_config_arguments",
    "checkpoint",
    "init_distributed",
    "initialize",
    "pipe",
    "testing",
    "utils",
    "zero",
]

_HOMES = {
    "Config": "sheer.config",
    "Engine": "sheer.engine",
    "LayerSpec": "sheer.pipeline",
    "OffloadStateTypeEnum": "sheer.offloading",
    "PipelineModule": "sheer.pipeline",
    "RepeatingLoader": "sheer.data",
    "StepResult": "sheer.observe",
    "TiedLayerSpec": "sheer.pipeline",
    "add_config_arguments": "sheer.setup",
    "init_distributed": "sheer.setup",
    "initialize": "sheer.setup",
} | {name: "sheer.errors" for name in __all__ if name.endswith("Error")}
_MODULES = frozenset({"checkpoint", "pipe", "testing", "utils", "zero"})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"sheer.{name}")
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'sheer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
