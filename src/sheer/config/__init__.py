"""What a run is asked to do: DeepSpeed's JSON key names, strict, frozen, with "auto" resolved in one place.

A section (`config.fp16`, `config.compile`, ...) is handed whole to the one room that reads it, once, when it is built.
"""

from __future__ import annotations

from sheer.config.batch import BatchSizes, resolve_batch
from sheer.config.model import Config
from sheer.config.sections import (
    Bf16,
    Checkpoint,
    Compile,
    CsvMonitor,
    DataLoader,
    DataTypes,
    Fp16,
    Optimizer,
    Scheduler,
    TensorBoard,
    TorchAutocast,
    Wandb,
    ZeroOptimization,
)

__all__ = [
    "BatchSizes",
    "Bf16",
    "Checkpoint",
    "Compile",
    "Config",
    "CsvMonitor",
    "DataLoader",
    "DataTypes",
    "Fp16",
    "Optimizer",
    "Scheduler",
    "TensorBoard",
    "TorchAutocast",
    "Wandb",
    "ZeroOptimization",
    "resolve_batch",
]
