"""Where a run's numbers go: a progress bar, CSV files, TensorBoard, Weights & Biases.

Every monitor is fed with a step and its named numbers, and knows nothing of the engine. Which ranks feed one is the
engine's decision (rank 0's alone, as a rule).
"""

from __future__ import annotations

from sheer.monitor.base import Monitor
from sheer.monitor.build import build_monitors
from sheer.monitor.files import CsvMonitor
from sheer.monitor.progress import Progress
from sheer.monitor.services import TensorBoardMonitor, WandbMonitor

__all__ = ["CsvMonitor", "Monitor", "Progress", "TensorBoardMonitor", "WandbMonitor", "build_monitors"]
