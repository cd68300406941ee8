"""What the actions of `sheer ckpt` share: arguments, progress on a terminal, sizes and names for people."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def add_place(parser: argparse.ArgumentParser) -> None:
    """The arguments that name one checkpoint, and `--json`."""
    parser.add_argument("directory", metavar="FOLDER", help="the directory of checkpoints, or one checkpoint's own")
    parser.add_argument("--tag", help="which checkpoint (default: the one that `latest` names)")
    parser.add_argument("--json", action="store_true", help="as JSON")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes on standard error where that is a terminal; call what it gives with bytes done."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def size(count: int) -> str:
    """Bytes in kB below a megabyte, in MB below ten gigabytes, else in GB."""
    if count < 1e6:
        return f"{count / 1e3:,.1f} kB"
    return f"{count / 1e6:,.1f} MB" if count < 1e10 else f"{count / 1e9:,.1f} GB"


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts `blocks.2` before `blocks.10`."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
