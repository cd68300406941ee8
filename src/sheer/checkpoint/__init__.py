"""Checkpoints: logical tensors by name, saved as a mirror of how they load, and loaded as a transaction.

The room speaks of `Shard`s, 1-D intervals of named tensors, and knows no engine, stage or bucket. Files are described
in `index.py`, how a save becomes visible in `folder.py`.
"""

from sheer.checkpoint.background import Background
from sheer.checkpoint.folder import find, list_tags, locate, prune
from sheer.checkpoint.index import Index
from sheer.checkpoint.loading import (
    LoadReport,
    load,
    load_full,
    open_checkpoint,
    open_together,
    read_full,
    read_rng,
    read_state,
)
from sheer.checkpoint.local import at_hand
from sheer.checkpoint.mapped import Source
from sheer.checkpoint.names import Names
from sheer.checkpoint.opening import Opened, open_any
from sheer.checkpoint.ranks import Alone, Axis, on_first, together
from sheer.checkpoint.reader import Reader, Request
from sheer.checkpoint.saving import Begun, begin, finish, save
from sheer.checkpoint.shard import Key, Shard

__all__ = [
    "Alone",
    "Axis",
    "Background",
    "Begun",
    "Index",
    "Key",
    "LoadReport",
    "Names",
    "Opened",
    "Reader",
    "Request",
    "Shard",
    "Source",
    "at_hand",
    "begin",
    "find",
    "finish",
    "list_tags",
    "load",
    "load_full",
    "locate",
    "on_first",
    "open_any",
    "open_checkpoint",
    "open_together",
    "prune",
    "read_full",
    "read_rng",
    "read_state",
    "save",
    "together",
]
