"""`sheer config`: check a config file, explain it, print the JSON schema. A bad file raises, and exits with 2."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sheer.config.explain import Row

# Wide enough for any row: what goes into a pipe is one line a key, for grep.
_PIPE_WIDTH = 2000


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `config check`, `config explain` and `config schema`."""
    parser = subparsers.add_parser("config", help="check or explain a config file, or print the JSON schema")
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    check = actions.add_parser("check", help="say what is wrong with a file; exit code 2 if anything is")
    check.add_argument("file", help="path to a JSON config")
    check.add_argument("--ranks", type=int, metavar="N", help="also resolve the batch sizes for N data-parallel ranks")
    check.set_defaults(run=run_check)

    explain = actions.add_parser("explain", help="print the resolved config: value, source, who reads it, remarks")
    explain.add_argument("file", help="path to a JSON config")
    explain.add_argument("--json", action="store_true", help="as a JSON list of rows")
    explain.set_defaults(run=run_explain)

    schema = actions.add_parser("schema", help="print the JSON schema of a config file, for editors")
    schema.set_defaults(run=run_schema)


def run_check(args: argparse.Namespace) -> int:
    """Print `ok`, with the batch sizes where a number of ranks was given."""
    from sheer.config import Config, resolve_batch

    config = Config.load(args.file)
    said = f"{args.file}: ok"
    if args.ranks is not None:
        sizes = resolve_batch(config, args.ranks)
        said += f"; train_batch_size {sizes.train} = micro-batch {sizes.micro} * accumulation {sizes.accumulation}"
        said += f" * ranks {args.ranks}"
    print(said)
    return 0


def run_explain(args: argparse.Namespace) -> int:
    """Print every key of the resolved config as a table or as JSON."""
    from sheer.config import Config
    from sheer.config.explain import explain

    rows = explain(Config.load(args.file))
    if args.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        _print_table(rows)
    return 0


def run_schema(args: argparse.Namespace) -> int:
    """Print the JSON schema."""
    from sheer.config.schema import json_schema

    print(json.dumps(json_schema(), indent=2, allow_nan=False))
    return 0


def _print_table(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sheer.config.kinds import show

    table = Table("key", "value", "source", "read by", "remarks", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        style = {"given": "", "auto": "cyan", "default": "dim"}[row.source]
        cells = (row.key, show(row.value), row.source, row.reader, row.remark)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells), style=style)
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))
