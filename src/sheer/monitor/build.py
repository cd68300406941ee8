"""From the config's sections to monitors."""

from __future__ import annotations

from typing import Protocol

from sheer.monitor.base import Monitor
from sheer.monitor.files import CsvMonitor
from sheer.monitor.services import TensorBoardMonitor, WandbMonitor


class FileSection(Protocol):
    """The `csv_monitor` or `tensorboard` section, as far as it is read here."""

    @property
    def enabled(self) -> bool:
        """Whether to write."""

    @property
    def output_path(self) -> str:
        """Directory to write below; empty means the default."""

    @property
    def job_name(self) -> str:
        """Name of the run's own directory in it."""


class WandbSection(Protocol):
    """The `wandb` section, as far as it is read here."""

    @property
    def enabled(self) -> bool:
        """Whether to report."""

    @property
    def project(self) -> str:
        """Project of the run."""

    @property
    def group(self) -> str | None:
        """Group of the run."""

    @property
    def team(self) -> str | None:
        """Entity that owns the run."""


def build_monitors(csv_monitor: FileSection, *, tensorboard: FileSection, wandb: WandbSection) -> tuple[Monitor, ...]:
    """The monitors whose section is enabled. ConfigError where one needs a package that is not installed."""
    monitors: list[Monitor] = []
    if csv_monitor.enabled:
        monitors.append(CsvMonitor(csv_monitor.output_path or "csv_monitor", job_name=csv_monitor.job_name))
    if tensorboard.enabled:
        monitors.append(TensorBoardMonitor(tensorboard.output_path or "runs", job_name=tensorboard.job_name))
    if wandb.enabled:
        monitors.append(WandbMonitor(project=wandb.project, group=wandb.group, team=wandb.team))
    return tuple(monitors)
