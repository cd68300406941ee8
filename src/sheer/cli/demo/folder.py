"""What a run of the demo leaves on disk: where each file lies, and the curve, cut back to the checkpoint on resume."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from sheer.cli.demo.knobs import Knobs
from sheer.errors import UsageError

LOCK_PATIENCE = 10.0
"""Seconds to wait for the processes of an earlier run to be gone."""


@dataclass(frozen=True)
class Folder:
    """The files of one run, all below `root`."""

    root: Path

    @property
    def knobs(self) -> Path:
        """The knobs the run was started with."""
        return self.root / "knobs.json"

    @property
    def config(self) -> Path:
        """The engine's configuration, as a user would write it."""
        return self.root / "config.json"

    @property
    def curve(self) -> Path:
        """Loss, gradient norm and learning rate of every step, as CSV."""
        return self.root / "curve.csv"

    @property
    def checkpoints(self) -> Path:
        """Where the engine saves."""
        return self.root / "checkpoints"

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return (self.checkpoints / "latest").exists()

    @property
    def sample(self) -> Path:
        """Text that the trained model wrote."""
        return self.root / "sample.txt"

    @property
    def picture(self) -> Path:
        """The loss curve as a picture."""
        return self.root / "loss.png"

    def log(self, rank: int) -> Path:
        """What the process of `rank` printed."""
        return self.root / f"rank{rank}.log"

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the folder for this run; gives the lock's file descriptor.

        Workers inherit the descriptor, so the folder stays locked until the last process of a killed run is gone.
        """
        descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _wait_for_lock(descriptor, self.root)
            yield descriptor
        finally:
            os.close(descriptor)


def prepare(root: Path, *, knobs: Knobs) -> Folder:
    """Note the knobs of a run, or check that the run already there was started with the same ones.

    Before its first checkpoint a run has nothing to lose, so its knobs may still change.
    """
    folder = Folder(root)
    _check_ours(folder)
    if folder.has_checkpoint:
        _check_same(folder, knobs)
    else:
        replace_text(folder.knobs, knobs.to_json() + "\n")
    return folder


def make_root(root: Path) -> None:
    """Create `root`, or say why it cannot be."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {root} cannot be made: {error.strerror}; name a folder that can be written") from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise UsageError(f"--out {root} cannot be written; name another folder")


def clear(root: Path) -> None:
    """Remove an earlier run's files from `root`, and nothing else that may lie there."""
    folder = Folder(root)
    _check_ours(folder)
    # The knobs go last: a removal cut short is still recognised as a run of the demo.
    for path in (folder.curve, folder.config, folder.sample, folder.picture, *root.glob("rank*.log"), folder.knobs):
        if path == folder.knobs and folder.checkpoints.exists():
            shutil.rmtree(folder.checkpoints)
        path.unlink(missing_ok=True)


def _check_ours(folder: Folder) -> None:
    """Refuse a folder whose files no run of the demo made: they would be written over, or removed by --fresh."""
    if folder.knobs.exists():  # the first file that a run writes, and the last that --fresh removes
        return
    paths = (folder.config, folder.curve, folder.checkpoints, folder.sample, folder.picture)
    names = [path.name for path in paths if path.exists()]
    if names:
        raise UsageError(
            f"{folder.root} holds {', '.join(names)} but no {folder.knobs.name}, so they are not of a run of the demo;"
            " pass --out with another folder"
        )


def _check_same(folder: Folder, knobs: Knobs) -> None:
    try:
        earlier = Knobs.from_json(folder.knobs.read_text())
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{folder.root} holds a checkpoint, but its {folder.knobs.name} cannot be read ({error});"
            " pass --fresh to start over, or --out with another folder"
        ) from error
    differences = earlier.differences(knobs)
    if differences:
        raise UsageError(
            f"{folder.root} holds a run with other knobs: {'; '.join(differences)}."
            " Repeat the earlier ones to go on with it, pass --fresh to start over, or --out with another folder"
        )


def _wait_for_lock(descriptor: int, root: Path) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"another demo is running in {root}; wait for it, or pass --out with another folder"
                ) from None
            time.sleep(0.1)
        else:
            return


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one move: a reader sees the old content or the new one."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path)


class Point(NamedTuple):
    """One row of the curve."""

    step: int
    loss: float
    grad_norm: float
    lr: float

    def row(self) -> str:
        """As a line of CSV; floats so that they read back exactly."""
        return f"{self.step},{self.loss!r},{self.grad_norm!r},{self.lr!r}\n"


HEADER = "step,loss,grad_norm,lr\n"


class Curve:
    """The curve's file, appended to step by step by the one process that owns it."""

    def __init__(self, path: Path, *, upto: int) -> None:
        """Open `path` cut back to the first `upto` steps; raises UsageError where it holds fewer."""
        kept = read_curve(path)[:upto] if upto else []
        if [point.step for point in kept] != list(range(1, upto + 1)):
            raise UsageError(
                f"{path} does not hold every step up to {upto}, where the last checkpoint stands;"
                " pass --fresh to start over"
            )
        replace_text(path, HEADER + "".join(point.row() for point in kept))
        self._stream: IO[str] = path.open("a")

    def append(self, point: Point) -> None:
        """Add one step; it outlives this process from here on."""
        self._stream.write(point.row())
        self._stream.flush()

    def sync(self) -> None:
        """Bring all steps so far to the disk; a checkpoint must not know more steps than the curve."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_curve(path: Path) -> list[Point]:
    """The complete rows of the curve at `path`, up to one that an interrupted write cut; empty without a file."""
    if not path.exists():
        return []
    points = []
    for line in path.read_text().splitlines(keepends=True)[1:]:
        cells = line.split(",")
        if not line.endswith("\n") or len(cells) != len(Point._fields):
            break
        points.append(Point(int(cells[0]), *map(float, cells[1:])))
    return points
