"""`sheer ckpt verify`: every byte of a checkpoint against its checksum. Goes on after damage, to list all of it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from sheer.cli.ckpt.common import add_place, progress, size

if TYPE_CHECKING:
    from sheer.checkpoint import Index


def register(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ckpt verify`."""
    parser = actions.add_parser(
        "verify", help="read every byte and compare checksums; exit code 1 where any is damaged"
    )
    add_place(parser)
    parser.add_argument("--all", action="store_true", help="every checkpoint in FOLDER")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print, for each checkpoint, that it is whole or all that is damaged."""
    from sheer.checkpoint import list_tags

    tags = list_tags(args.directory) if args.all else [args.tag]
    found = [_verify(args.directory, tag) for tag in tags]
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for checkpoint in found:
            _print(checkpoint)
    return 1 if any(checkpoint["faults"] for checkpoint in found) else 0


def _verify(directory: str, tag: str | None) -> dict[str, Any]:
    from sheer.checkpoint import locate, open_checkpoint
    from sheer.errors import CheckpointError

    place = locate(directory, tag)
    try:
        index = open_checkpoint(place)
        faults, nbytes = _faults(index)
    except CheckpointError as error:  # it is there, and does not hold together
        faults, nbytes = [str(error)], 0
    return {"directory": str(place), "bytes": nbytes, "faults": faults}


def _faults(index: Index) -> tuple[list[str], int]:
    """All that is wrong with the bytes, and how many were read."""
    import torch

    from sheer.checkpoint import Reader, Request, read_rng, read_state
    from sheer.errors import CheckpointError

    faults, nbytes = [], 0
    for read in (lambda: read_state(index), lambda: read_rng(index, 0)):
        try:
            read()
        except CheckpointError as error:
            faults.append(str(error))
    total = sum(entry.nbytes for _, entry in index.entries())
    with progress(f"verifying {index.tag}", total) as advance, Reader(index, told=advance) as reader:
        for key, entry in index.entries():
            nowhere = torch.empty(entry.numel, dtype=entry.torch_dtype, device="meta")
            try:
                nbytes += reader.check([Request(key, 0, nowhere)])
            except CheckpointError as error:
                faults.append(str(error))
    return list(dict.fromkeys(faults)), nbytes


def _print(found: dict[str, Any]) -> None:
    if not found["faults"]:
        print(f"{found['directory']}: whole, {size(found['bytes'])} verified")
    for fault in found["faults"]:
        print(fault)
