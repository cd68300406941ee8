"""`sheer ckpt show`: what a checkpoint holds. Reads the index and the counters only: quick whatever the size."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from sheer.cli.ckpt.common import add_place, natural, open_ours, size

if TYPE_CHECKING:
    from sheer.checkpoint import Index


def register(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ckpt show`."""
    parser = actions.add_parser("show", help="list the tensors of a checkpoint, and what it is")
    add_place(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table and the summary of one checkpoint."""
    index = open_ours(args.directory, args.tag)
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
    return sorted(rows, key=lambda row: natural(row["name"]))


def _summary(index: Index) -> dict[str, Any]:
    from sheer.checkpoint import read_state

    entries = list(index.entries())
    state = read_state(index)
    return {
        "tag": index.tag,
        "directory": str(index.directory),
        "saved_at": index.content.saved_at,
        "world": index.content.world,
        "step": state.get("counters", {}).get("global_steps"),
        "run": index.facts.get("run", {}),
        "optimizer": index.facts.get("optimizer", {}).get("class"),
        "scheduler": index.facts.get("scheduler", {}).get("class"),
        "frozen": index.facts.get("frozen", []),
        "left_out": index.facts.get("left_out", []),
        "client_state": sorted(map(str, state.get("client_state", {}))),
        "checksum": index.content.checksum,
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
    step = "" if summary["step"] is None else f", step {summary['step']}"
    print(f"\n{summary['tag']} in {summary['directory']}: saved {summary['saved_at']} by {ranks}{step}")
    print(
        f"{summary['parameters']:,} parameters; model {size(summary['model_bytes'])}, optimizer "
        f"{size(summary['optimizer_bytes'])}, on disk {size(summary['file_bytes'])}, checksums {summary['checksum']}"
    )
    for line in _of_the_run(summary):
        print(line)


def _of_the_run(summary: dict[str, Any]) -> list[str]:
    """Who wrote it with what settings, as far as the writer said."""
    said = {**summary["run"], "optimizer": summary["optimizer"], "scheduler": summary["scheduler"]}
    shown = ", ".join(f"{key} {value}" for key, value in said.items() if value is not None and key != "world")
    lines = [f"run: {shown}"] if shown else []
    for name, label in (("frozen", "frozen"), ("left_out", "left out"), ("client_state", "client state")):
        if summary[name]:
            lines.append(f"{label}: {', '.join(summary[name])}")
    return lines
