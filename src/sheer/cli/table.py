"""Tables on standard output, for people and for grep."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

# Wide enough for any row.
_UNBOUNDED = 2000


def print_table(table: Table, *, fold: bool = True) -> None:
    """Print `table` without spaces at the ends of lines: one line a row in a pipe, and on a terminal unless `fold`."""
    from rich.console import Console

    console = Console(width=None if fold and sys.stdout.isatty() else _UNBOUNDED)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))
