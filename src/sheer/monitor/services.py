"""TensorBoard and Weights & Biases. Their packages are imported when such a monitor is built, and only then."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sheer.errors import ConfigError


class TensorBoardMonitor:
    """Writes event files to `output_path/job_name`, to be shown by `tensorboard --logdir output_path`.

    A resumed run hides what an earlier one wrote from its first step on.
    """

    def __init__(self, output_path: str | os.PathLike[str], *, job_name: str) -> None:
        self._directory = Path(output_path) / job_name
        self._module = _import("torch.utils.tensorboard", section="tensorboard", package="tensorboard")
        self._writer: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar for each name."""
        if self._writer is None:
            self._writer = self._module.SummaryWriter(str(self._directory), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbMonitor:
    """Reports to one run of Weights & Biases, which it starts when built."""

    def __init__(self, *, project: str, group: str | None = None, team: str | None = None) -> None:
        module = _import("wandb", section="wandb", package="wandb")
        self._run: Any = module.init(project=project, group=group, entity=team)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run: wait until it is uploaded."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _import(module: str, *, section: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{section}.enabled=True needs the package {package!r}, which cannot be imported ({error}). Install it "
            f"with pip install {package}, or set {section}.enabled to false."
        ) from error
