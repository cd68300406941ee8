"""`sheer config`: check a config file, explain it, print the JSON schema."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sheer.config import Config
    from sheer.config.explain import Row

BAD_FILE = 2
"""Exit code for a file that is not a valid config; the reasons are on stderr."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `config check`, `config explain` and `config schema`."""
    parser = subparsers.add_parser("config", help="check or explain a config file, or print the JSON schema")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

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
    """Print `ok`, with the batch sizes where a number of ranks was given, or the problems on stderr."""
    from sheer.config import resolve_batch
    from sheer.errors import SheerError

    config = _load(args.file)
    if config is None:
        return BAD_FILE
    if args.ranks is None:
        print(f"{args.file}: ok")
        return 0
    try:
        sizes = resolve_batch(config, args.ranks)
    except SheerError as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return BAD_FILE
    print(
        f"{args.file}: ok; on {args.ranks} ranks train_batch_size {sizes.train} = "
        f"micro-batch {sizes.micro} * accumulation {sizes.accumulation} * ranks {args.ranks}"
    )
    return 0


def run_explain(args: argparse.Namespace) -> int:
    """Print every key of the resolved config as a table or as JSON."""
    from sheer.config.explain import explain

    config = _load(args.file)
    if config is None:
        return BAD_FILE
    rows = explain(config)
    if args.json:
        print(json.dumps([row._asdict() for row in rows], indent=2, default=repr))
    else:
        _print_table(rows, title=args.file)
    return 0


def run_schema(args: argparse.Namespace) -> int:
    """Print the JSON schema."""
    from sheer.config.schema import json_schema

    print(json.dumps(json_schema(), indent=2, allow_nan=False))
    return 0


def _load(file: str) -> Config | None:
    """The config in `file`; None after its problems have been printed to stderr."""
    from sheer.config import Config
    from sheer.errors import ConfigError

    try:
        return Config.load(file)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return None


def _print_table(rows: list[Row], *, title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A pipe has no width of its own: there, a row is kept on one line for grep.
    console = Console() if sys.stdout.isatty() else Console(width=240)
    table = Table(title=title, box=None, pad_edge=False, title_justify="left", header_style="bold")
    for name in ("key", "value", "source", "read by"):
        table.add_column(name, no_wrap=name != "value", overflow="fold")
    table.add_column("remarks", overflow="fold")
    for row in rows:
        style = {"given": "", "auto": "cyan", "default": "dim"}[row.source]
        cells: list[Any] = [row.key, _shown(row.value), row.source, row.reader, row.remark]
        table.add_row(*(Text(cell) for cell in cells), style=style)
    console.print(table)


def _shown(value: object) -> str:
    from sheer.config.kinds import show

    return show(value)
