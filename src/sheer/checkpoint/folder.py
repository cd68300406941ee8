"""The directory that holds checkpoints: tags, `latest`, and how a save becomes visible in one step.

A save is written to `.tmp-<tag>-...`, which no reader looks at, flushed, and renamed to `<tag>`. Where `<tag>` exists
already it is first renamed to `.old-<tag>`, and removed last; a reader that finds no `<tag>` looks there, so that at
every moment one complete checkpoint of that tag can be found. `latest` moves after all that. What an interrupted save
left behind is put right by the next one, under a lock that the system frees when its holder dies.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sheer.checkpoint.index import INDEX
from sheer.checkpoint.tensorfile import write_fully
from sheer.errors import CheckpointError, did_you_mean
from sheer.observe import logger

LATEST = "latest"
_LOCK, _OLD = ".lock", ".old-"
TEMP = ".tmp-"
"""What the names of unfinished things begin with; a save removes what it finds of them."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def check_tag(tag: object) -> str:
    """`tag`, or a CheckpointError where it cannot be the name of a checkpoint."""
    fault = ""
    if not isinstance(tag, str):
        raise CheckpointError(f"tag {tag!r:.80} is a {type(tag).__name__}; a tag is a str such as 'global_step100'.")
    if not tag or tag != tag.strip() or not tag.isprintable():
        fault = "it is empty, begins or ends with a space, or holds characters that cannot be printed"
    elif "/" in tag or "\\" in tag:
        fault = "it holds a path separator; the tag is one directory name inside the checkpoint directory"
    elif tag.startswith(".") or tag == LATEST:
        fault = "names that begin with a dot, and 'latest', have a meaning of their own there"
    elif len(tag.encode()) > 200:
        fault = f"it is {len(tag.encode())} bytes long; at most 200"
    if fault:
        raise CheckpointError(f"tag {tag!r:.220} cannot be used: {fault}.")
    return tag


def list_tags(root: str | os.PathLike[str]) -> list[str]:
    """The tags of the complete checkpoints in `root`, oldest first."""
    with explained(f"cannot list {root}"):
        names = os.listdir(root) if Path(root).is_dir() else []
    tags = {name.removeprefix(_OLD) for name in names if not name.startswith(TEMP)}
    found = [(directory, tag) for tag in tags if (directory := _directory(Path(root), tag))]
    return [tag for directory, tag in sorted(found, key=lambda item: ((item[0] / INDEX).stat().st_mtime_ns, item[1]))]


def read_latest(root: str | os.PathLike[str]) -> str | None:
    """The tag that `latest` names; None where there is no such file."""
    path = Path(root) / LATEST
    with explained(f"cannot read {path}"):
        if not path.is_file():
            return None
        text = path.read_bytes()[:1000].decode(errors="replace").strip()
    try:
        return check_tag(text)
    except CheckpointError as error:
        raise CheckpointError(f"{path} names no tag ({error}); pass `tag`: {_known(root)}") from error


def find(root: str | os.PathLike[str], tag: str | None = None) -> Path | None:
    """The directory of checkpoint `tag`, or of the one that `latest` names; None where there is none to be found.

    `root` may also be the checkpoint's own directory. Raises CheckpointError where `latest` names a tag that is gone:
    then something was lost, and starting afresh would hide it.
    """
    base = Path(root)
    if tag is not None:
        return _directory(base, check_tag(tag))
    if (base / INDEX).is_file():
        return base
    latest = read_latest(base)
    if latest is None:
        return None
    directory = _directory(base, latest)
    if directory is None and (base / latest).is_dir():
        raise CheckpointError(
            f"{base / LATEST} names {latest!r}, which is there but has no {INDEX}: it is no checkpoint of Sheer's own "
            "format. One of DeepSpeed is read by engine.load_checkpoint and turned into one by `sheer ckpt import`."
        )
    if directory is None:
        raise CheckpointError(f"{base / LATEST} names {latest!r}, which is not there; pass `tag`: {_known(root)}")
    return directory


def locate(root: str | os.PathLike[str], tag: str | None = None) -> Path:
    """`find`, with an error that says what is there where nothing was found."""
    directory = find(root, tag)
    if directory is not None:
        return directory
    if not Path(root).is_dir():
        raise CheckpointError(f"there is no directory {root}, so no checkpoint in it.")
    if tag is None:
        if not list_tags(root):
            raise CheckpointError(f"{root} holds no checkpoint: it has no `latest`, no tags, and no index.json.")
        raise CheckpointError(f"{root} has no file `latest`, so name one by `tag` (--tag). {_known(root)}")
    near = did_you_mean(tag, list_tags(root))
    raise CheckpointError(f"{root} has no checkpoint {tag!r}.{near} {_known(root)}")


def tag_of(directory: Path) -> str:
    """The tag of a checkpoint's directory, wherever an interrupted save left it."""
    return directory.resolve().name.removeprefix(_OLD)


def versions(root: Path, tag: str) -> list[Path]:
    """Where checkpoint `tag`, or one that is about to replace it or was replaced by it, may be; its own place first."""
    return [root / tag, root / f"{_OLD}{tag}", *sorted(root.glob(f"{TEMP}{glob.escape(tag)}-*"))]


def _directory(root: Path, tag: str) -> Path | None:
    """Where checkpoint `tag` is now: in its place, or put aside by a save that was interrupted."""
    places = (root / tag, root / f"{_OLD}{tag}")
    return next((place for place in places if (place / INDEX).is_file()), None)


def _known(root: str | os.PathLike[str]) -> str:
    tags = list_tags(root)
    shown = ", ".join(repr(tag) for tag in tags[-10:])
    return f"It has {len(tags)} checkpoints, the newest: {shown}." if tags else "It has no checkpoints."


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an error of the file system into a CheckpointError that begins with `what`."""
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(f"{what}: {error.strerror or error}{place}.") from error


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries: a file that was created or renamed in it survives a power cut after this."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have nothing to flush and say so this way
            raise
    finally:
        os.close(fd)


def prune(root: str | os.PathLike[str], *, keep: int, dry_run: bool = False) -> list[str]:
    """Remove all but the `keep` newest checkpoints in `root`, and what interrupted saves left; the tags that went.

    The one that `latest` names stays in any case. Refused while a save is in progress. A `dry_run` changes nothing.
    """
    base = Path(root)
    if keep < 1:
        raise CheckpointError(f"keep is {keep}; it is how many checkpoints stay, at least 1.")
    if not list_tags(base):
        raise CheckpointError(f"{base} holds no checkpoint, so nothing in it is ours to remove.")
    with explained(f"cannot prune {base}"):
        if dry_run:
            return _excess(base, keep)
        lock = _take_lock(base)
        try:
            _repair(base)
            removed = _excess(base, keep)
            for tag in removed:
                _discard(base, base / tag)
        finally:
            _free_lock(lock)
    return removed


def _excess(root: Path, keep: int) -> list[str]:
    """The tags beyond the `keep` newest, without the one that `latest` names."""
    latest = read_latest(root)
    return [tag for tag in list_tags(root)[:-keep] if tag != latest]


class Staging:
    """A save in progress, on one rank for each folder: holds the lock, owns the directory aside, makes it visible or
    removes it."""

    def __init__(self, root: Path, tag: str, *, nbytes: int, name: str | None = None) -> None:
        """Take the lock, put right what an interrupted save left, check that `nbytes` fit, and make the directory,
        called `name` if it is given."""
        self._root, self._tag = root, tag
        self._replaced: list[Path] = []
        self._placed = False
        self.path = root / (name or f"{TEMP}{tag}-{secrets.token_hex(4)}")
        with explained(f"cannot save to {root}"):
            _make_root(root)
            self._lock = _take_lock(root)
        try:
            with explained(f"cannot save to {root}"):
                _repair(root)
                self._refuse_foreign()
                check_space(root, nbytes)
                os.mkdir(self.path)
        except BaseException:
            _free_lock(self._lock)
            raise

    def place(self) -> Path:
        """Make the checkpoint visible under its tag; where it is then. What it replaces stays aside."""
        final, old = self._root / self._tag, self._root / f"{_OLD}{self._tag}"
        with explained(f"cannot put checkpoint {self._tag!r} in place; the one before is as it was"):
            sync_directory(self.path)
            try:
                if final.exists():
                    os.rename(final, old)
                    self._replaced = [old]
                os.rename(self.path, final)
                self._placed = True
                sync_directory(self._root)
            except OSError:
                self.take_back()
                raise
        return final

    def take_back(self) -> None:
        """Undo `place`, as far as it was done. Never raises: the next save mends what is left."""
        final = self._root / self._tag
        with suppress(OSError):
            if self._placed:
                os.rename(final, self.path)
            for old in self._replaced:
                os.rename(old, final)
        self._replaced, self._placed = [], False

    def point(self) -> None:
        """Move `latest` to it."""
        with explained(f"checkpoint {self._tag!r} is complete, but `latest` could not be moved to it"):
            _point_latest(self._root, self._tag)

    def close(self) -> None:
        """Remove what was not committed and free the lock. Never raises: the next save cleans what stays behind."""
        shutil.rmtree(self.path, ignore_errors=True)
        _free_lock(self._lock)

    def _refuse_foreign(self) -> None:
        """A directory of that name that is no checkpoint of ours is someone's data; it is not ours to replace."""
        final = self._root / self._tag
        if os.path.lexists(final) and not (final / INDEX).is_file():
            raise CheckpointError(
                f"{final} exists and is no checkpoint of Sheer (it has no {INDEX}), so it is left alone. "
                "Save under another tag or directory, or move it away."
            )

    def tidy(self, keep_last: int | None) -> None:
        """Remove the replaced checkpoint and those beyond `keep_last`. The new one is safe: a failure is only said."""
        try:
            excess = _excess(self._root, keep_last) if keep_last else []
            for directory in [*self._replaced, *(self._root / tag for tag in excess if tag != self._tag)]:
                _discard(self._root, directory)
        except (OSError, CheckpointError) as error:
            logger.warning("checkpoint %r is saved, but an older one could not be removed: %s", self._tag, error)


def _make_root(root: Path) -> None:
    if root.is_dir():
        return
    missing = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


def _take_lock(root: Path) -> int:
    """An open file that holds the lock on `root` until it is closed or this process ends."""
    fd = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        write_fully(fd, f"process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError as error:
        if error.errno in _NO_LOCKS:
            logger.warning("%s is on a file system without locks: two jobs saving there could disturb each other", root)
            return fd
        holder = os.pread(fd, 200, 0).decode(errors="replace")
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise
        raise CheckpointError(
            f"another save to {root} is in progress ({holder}). Wait for it, or save to another directory."
        ) from error
    return fd


def _free_lock(fd: int) -> None:
    """Also where a process that was forked meanwhile (a loader's worker) still has the file open."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _repair(root: Path) -> None:
    """Put right what interrupted saves left. The lock is held, so nobody is writing any of it."""
    for entry in sorted(os.listdir(root)):
        path = root / entry
        if entry.startswith(TEMP):
            logger.info("removing what an interrupted save left: %s", path)
            _remove(path)
        elif entry.startswith(_OLD):
            place = root / entry.removeprefix(_OLD)
            if (place / INDEX).is_file():
                _discard(root, path)
            elif not place.exists():
                logger.info("putting back a checkpoint that an interrupted save had moved aside: %s", place)
                os.rename(path, place)


def _discard(root: Path, directory: Path) -> None:
    """Remove a checkpoint; one rename first, so that no half of it can ever be taken for a whole."""
    junk = root / f"{TEMP}discard-{secrets.token_hex(4)}"
    os.rename(directory, junk)
    _remove(junk)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def check_space(root: Path, nbytes: int) -> None:
    """Refuse to save what does not fit, before its first byte."""
    free = shutil.disk_usage(root).free
    if free < nbytes:
        raise CheckpointError(
            f"{root} has {free / 1e9:.3f} GB free; this checkpoint needs {nbytes / 1e9:.3f} GB (a replaced one is "
            "removed only after the new one is complete). Nothing was written. Free space, or save elsewhere."
        )


def _point_latest(root: Path, tag: str) -> None:
    aside = root / f"{TEMP}{LATEST}-{secrets.token_hex(4)}"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            write_fully(fd, f"{tag}\n".encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(aside, root / LATEST)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    sync_directory(root)
