"""Other projects' files: a module (or package) per format, none of which knows another (but that a Hugging Face folder
is made of safetensors). Each reads `Foreign`, writes `Weights`, or both.

A format that reads is a `Format`: `find` knows its files, `read` maps them. One that writes has
`write(weights, target, ...)`, which makes `target`, which must not exist: aside first, flushed, and renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sheer.checkpoint.formats import dcp, deepspeed, hugging_face, safetensors_file, torch_file
from sheer.checkpoint.formats.foreign import Foreign, Format
from sheer.checkpoint.formats.weights import Weights

__all__ = ["Foreign", "Format", "Found", "Weights", "find_foreign"]

_READ: dict[str, Format] = {
    "DeepSpeed": deepspeed,
    "DCP": dcp,
    "Hugging Face": hugging_face,
    "safetensors": safetensors_file,
    "torch.save": torch_file,
}
"""In the order in which they are asked; a plain pickle is what is left."""


class Found(NamedTuple):
    """A checkpoint of another format that was found, not yet read; may be sent to other ranks."""

    format: str
    path: Path

    def read(self, groups: Sequence[Sequence[str]] | None = None) -> Foreign:
        """What it holds; see `Format.read`."""
        return _READ[self.format].read(self.path, groups)


def find_foreign(place: Path, tag: str | None = None) -> Found | None:
    """What another project wrote at `place`, a file or folder (as `tag` in it); None where nothing is known of it."""
    found = ((name, each.find(place, tag)) for name, each in _READ.items())
    return next((Found(name, path) for name, path in found if path is not None), None)
