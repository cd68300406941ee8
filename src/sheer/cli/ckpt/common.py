"""What the actions of `sheer ckpt` share: arguments, progress on a terminal, sizes and names for people."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sheer.checkpoint import Index


def add_place(parser: argparse.ArgumentParser) -> None:
    """The arguments that name one checkpoint, and `--json`."""
    parser.add_argument("directory", metavar="FOLDER", help="the directory of checkpoints, or one checkpoint's own")
    parser.add_argument("--tag", help="which checkpoint (default: the one that `latest` names)")
    parser.add_argument("--json", action="store_true", help="as JSON")


def open_ours(directory: str, tag: str | None) -> Index:
    """Open a checkpoint of ours; another project's is refused with its format and what to do."""
    from sheer.checkpoint import open_checkpoint
    from sheer.checkpoint.formats import find_foreign
    from sheer.errors import CheckpointError

    foreign = find_foreign(Path(directory), tag)
    if foreign is not None:
        raise CheckpointError(
            f"{foreign.path} was not saved by Sheer (its format: {foreign.format}). `sheer ckpt import` makes a "
            "checkpoint of it, and engine.load_checkpoint loads it as it is."
        )
    return open_checkpoint(directory, tag)


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
