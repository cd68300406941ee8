"""`sheer ckpt show`: what a checkpoint holds. Reads the index only, so it is quick whatever the size."""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sheer.checkpoint import Index


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ckpt show`."""
    parser = subparsers.add_parser("ckpt", help="look into a checkpoint")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    show = actions.add_parser("show", help="list the tensors of a checkpoint, and what it is")
    show.add_argument("directory", help="the directory of checkpoints, or one checkpoint's own")
    show.add_argument("--tag", help="which checkpoint (default: the one that `latest` names)")
    show.add_argument("--json", action="store_true", help="as JSON")
    show.set_defaults(run=run_show)


def run_show(args: argparse.Namespace) -> int:
    """Print the table and the summary of one checkpoint."""
    from sheer.checkpoint import open_checkpoint

    index = open_checkpoint(args.directory, args.tag)
    rows, summary = _rows(index), _summary(index)
    if args.json:
        print(json.dumps({**summary, "tensors": rows}, indent=2))
    else:
        _print(rows, summary)
    return 0


def _rows(index: Index) -> list[dict[str, Any]]:
    """One row per parameter and buffer, with the names of its optimizer states."""
    states: dict[str, list[str]] = {}
    for key, _ in index.entries():
        if key.kind.startswith("optim."):
            states.setdefault(key.name, []).append(key.kind.removeprefix("optim."))
    aliases: dict[str, list[str]] = {}
    for alias, owner in index.ties.items():
        aliases.setdefault(owner, []).append(alias)
    rows = [
        {
            "name": key.name,
            "kind": key.kind,
            "shape": list(entry.shape),
            "dtype": entry.dtype,
            "pieces": len(entry.pieces),
            "optimizer_states": sorted(states.get(key.name, [])),
            "tied": sorted(aliases.get(key.name, [])),
        }
        for key, entry in index.entries()
        if key.kind in ("param", "buffer")
    ]
    return sorted(rows, key=lambda row: _natural(row["name"]))


def _summary(index: Index) -> dict[str, Any]:
    entries = list(index.entries())
    return {
        "tag": index.tag,
        "directory": str(index.directory),
        "saved_at": index.content.saved_at,
        "world": index.content.world,
        "parameters": sum(entry.numel for key, entry in entries if key.kind == "param"),
        "model_bytes": sum(entry.nbytes for key, entry in entries if key.kind in ("param", "buffer")),
        "optimizer_bytes": sum(entry.nbytes for key, entry in entries if key.kind.startswith("optim.")),
        "file_bytes": sum(file.size for file in index.content.files.values()),
    }


def _print(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from sheer.cli.table import print_table

    table = Table(
        "name", "shape", "dtype", "kind", "pieces", "optimizer states", "tied to it", box=None, pad_edge=False
    )
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        lists = (", ".join(row["optimizer_states"]), ", ".join(row["tied"]))
        cells = (row["name"], shape, row["dtype"], row["kind"], str(row["pieces"]), *lists)
        table.add_row(*map(Text, cells))  # as text: a name may look like markup
    print_table(table, fold=False)  # a name cut or folded is none to copy
    ranks = "1 rank" if summary["world"] == 1 else f"{summary['world']} ranks"
    print(
        f"\n{summary['tag']} in {summary['directory']}: saved {summary['saved_at']} by {ranks}\n"
        f"{summary['parameters']:,} parameters; model {_size(summary['model_bytes'])}, optimizer "
        f"{_size(summary['optimizer_bytes'])}, on disk {_size(summary['file_bytes'])}"
    )


def _size(count: int) -> str:
    """Bytes in kB below a megabyte, else in MB."""
    return f"{count / 1e3:,.1f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts `blocks.2` before `blocks.10`."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
