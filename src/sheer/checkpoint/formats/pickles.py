"""The one way foreign pickles are read: torch's `weights_only` unpickler, which builds tensors and plain data only.

Names of foreign classes that are known to hold nothing but data are answered by `Inert`, which keeps what it is given
and does nothing; no foreign module is imported. Everything else is refused by name.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sheer.errors import CheckpointError


class Inert:
    """Stands for an object of a class that is not here: the arguments it was made of, and its fields."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Inert:
        """Keep the arguments."""
        made = object.__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Keep the fields; what is not a dict of them as `state`."""
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def read_pickle(
    path: Path, *, inert: Sequence[str] = (), within: io.RawIOBase | None = None, device: str | None = None
) -> Any:
    """What `torch.save` wrote to `path`, its tensors on the host, and mapped where the file is a zip archive.

    `inert`: full names of classes to take as data. `within`: the archive itself where it is a part of the file. On the
    `device` "meta", tensors are described and not read. Raises CheckpointError for a file that is damaged or would do
    more than hold data.
    """
    try:
        source: Any = within or path
        mapped = within is None and zipfile.is_zipfile(path)
        with torch.serialization.safe_globals([(Inert, name) for name in inert]):
            return torch.load(source, map_location=device or "cpu", weights_only=True, mmap=mapped)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "Unsupported" in line), lines[0]).strip()
        raise CheckpointError(
            f"{path} cannot be read by torch.load(weights_only=True), the only way Sheer reads a pickle: {reason}"
        ) from error
