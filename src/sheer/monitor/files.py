"""CSV files, one for each named number."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from sheer.errors import ConfigError


class CsvMonitor:
    """Writes `output_path/job_name/NAME.csv` with the columns `step` and NAME, a line per step, flushed at once.

    A file that is there is continued: lines from the first written step on are dropped, so that a run resumed from an
    earlier checkpoint has every step once. Characters of a name that do not suit a file name become `_`.
    """

    def __init__(self, output_path: str | os.PathLike[str], *, job_name: str) -> None:
        self._directory = Path(output_path) / job_name
        self._directory.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, TextIO] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line to each named file. ConfigError when a file of that name is not this monitor's."""
        for name, value in values.items():
            if name not in self._files:
                self._files[name] = self._open(name, step)
            # repr gives back the same float; plain str would do as well, but numbers may be of numpy's types.
            csv.writer(self._files[name], lineterminator="\n").writerow([step, repr(float(value))])
            self._files[name].flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def _open(self, name: str, step: int) -> TextIO:
        path = self._directory / (re.sub(r"[^\w.-]", "_", name) + ".csv")
        kept = _lines_before(path, name, step) if path.exists() else [["step", name]]
        aside = path.with_suffix(".csv.new")
        with aside.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(kept)
        aside.replace(path)
        return path.open("a", encoding="utf-8", newline="")


def _lines_before(path: Path, name: str, step: int) -> list[list[str]]:
    """The header and the whole lines of earlier steps; a line cut off by a crash is dropped with its step."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    if not lines or lines[0] != ["step", name]:
        raise ConfigError(
            f"csv_monitor: {path} exists, but its first line is not 'step,{name}', so it is not a file of this "
            "monitor. Move it away, or choose another csv_monitor.output_path or job_name."
        )
    earlier = [line for line in lines[1:] if len(line) == 2 and line[0].isdigit() and int(line[0]) < step]
    return [lines[0], *earlier]
