"""`sheer ckpt`: look into checkpoints, verify, compare and remove them. Needs no process group.

show.py     what one holds: the index and the counters      verify.py   every byte against its checksum
diff.py     which tensors of two differ, and by how much     prune.py    all but the newest go
export.py   the weights as other projects' files         importing.py  the other way round

However large a checkpoint is, memory stays at a few chunks of 8 MiB and the index (but for an export to pt). Exit
codes: 0 done; 1 damage was found (`verify`), or a difference (`diff`); 2 the request was wrong, or a checkpoint cannot
be opened or read.
"""

from __future__ import annotations

import argparse

DESCRIPTION = """
FOLDER is the directory of checkpoints, or one checkpoint's own. Exit codes: 0 done; 1 damage (verify) or a difference
(diff) was found; 2 the request was wrong or a checkpoint cannot be opened.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `sheer ckpt` and its actions."""
    from sheer.cli.ckpt import diff, export, importing, prune, show, verify

    parser = subparsers.add_parser("ckpt", help="look into checkpoints, verify, compare or remove them")
    parser.description = DESCRIPTION
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for module in (show, verify, diff, export, importing, prune):
        module.register(actions)
