"""`sheer ckpt diff`: which tensors of two checkpoints differ, and by how much. Compares a chunk at a time."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from sheer.cli.ckpt.common import natural, open_ours, progress

if TYPE_CHECKING:
    import torch

    from sheer.checkpoint import Index, Key, Reader

_STEP = 1 << 21  # elements compared at a time


def register(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ckpt diff`."""
    parser = actions.add_parser("diff", help="say which tensors of two checkpoints differ; exit code 1 where any does")
    for name in ("one", "other"):
        parser.add_argument(name, metavar=name.upper(), help="a directory of checkpoints, or one checkpoint's own")
        parser.add_argument(f"--tag-{name}", help=f"which checkpoint in {name.upper()} (default: the latest)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line per tensor that differs."""
    one, other = open_ours(args.one, args.tag_one), open_ours(args.other, args.tag_other)
    rows = _compare(one, other)
    if args.json:
        print(json.dumps({"one": str(one.directory), "other": str(other.directory), "differ": rows}, indent=2))
    else:
        _print(rows, one, other)
    return 1 if rows else 0


def _compare(one: Index, other: Index) -> list[dict[str, Any]]:
    from sheer.checkpoint import Reader

    mine, theirs = dict(one.entries()), dict(other.entries())
    keys = sorted(mine.keys() | theirs.keys(), key=lambda key: (key.kind, natural(key.name)))
    rows = []
    total = sum(
        entry.nbytes for entries in (mine, theirs) for key, entry in entries.items() if _alike(key, mine, theirs)
    )
    with (
        progress("comparing", total) as advance,
        Reader(one, told=advance) as first,
        Reader(other, told=advance) as second,
    ):
        for key in keys:
            found = _difference(key, mine.get(key), theirs.get(key), first, second)
            if found:
                rows.append({"kind": key.kind, "name": key.name, **found})
    return rows


def _alike(key: Key, mine: dict[Key, Any], theirs: dict[Key, Any]) -> bool:
    """Whether both have it in one shape and dtype, so that values can be compared."""
    both = key in mine and key in theirs
    return both and (mine[key].shape, mine[key].dtype) == (theirs[key].shape, theirs[key].dtype)


def _difference(key: Key, mine: Any, theirs: Any, first: Reader, second: Reader) -> dict[str, Any]:
    """How one tensor differs; empty where it does not."""
    if mine is None or theirs is None:
        return {"what": "only in the second" if mine is None else "only in the first"}
    if mine.shape != theirs.shape:
        return {"what": "shape", "one": list(mine.shape), "other": list(theirs.shape)}
    if mine.dtype != theirs.dtype:
        return {"what": "dtype", "one": mine.dtype, "other": theirs.dtype}
    return _in_values(key, mine.numel, mine.torch_dtype, first, second)


def _in_values(key: Key, numel: int, dtype: torch.dtype, first: Reader, second: Reader) -> dict[str, Any]:
    import torch

    from sheer.checkpoint import Request

    differ, largest, total = 0, 0.0, 0.0
    for start in range(0, numel, _STEP):
        one, other = (torch.empty(min(_STEP, numel - start), dtype=dtype, device="cpu") for _ in range(2))
        first.fill([Request(key, start, one)])
        second.fill([Request(key, start, other)])
        if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            continue
        wide = torch.complex128 if dtype.is_complex else torch.float64
        one, other = one.to(wide), other.to(wide)
        apart = (one != other) & ~(one.isnan() & other.isnan())
        differ += int(apart.sum())
        away = (one - other)[apart].abs()
        if away.numel():
            largest = max(largest, float(away.nan_to_num(nan=float("inf"), posinf=float("inf")).max()))
            total += float(away.square().sum())
    if not differ:
        return {}
    return {"what": "values", "differ": differ, "of": numel, "largest": largest, "norm": total**0.5}


def _print(rows: list[dict[str, Any]], one: Index, other: Index) -> None:
    from rich.table import Table
    from rich.text import Text

    from sheer.cli.table import print_table

    if not rows:
        print(f"{one.directory} and {other.directory} hold the same tensors")
        return
    table = Table("kind", "name", "differs in", "", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, (row["kind"], row["name"], row["what"], _details(row))))
    print_table(table, fold=False)
    print(f"\n{len(rows)} tensors differ between {one.directory} and {other.directory}")


def _details(row: dict[str, Any]) -> str:
    if row["what"] == "values":
        return f"{row['differ']:,} of {row['of']:,} elements, by at most {row['largest']:.3g} (norm {row['norm']:.3g})"
    return f"{row['one']} and {row['other']}" if "one" in row else ""
