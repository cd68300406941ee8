"""`sheer ckpt export`: the parameters and buffers of a checkpoint as other projects' files."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sheer.cli.ckpt.common import add_place, open_ours, progress, size

if TYPE_CHECKING:
    from sheer.checkpoint.formats import Weights

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def register(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ckpt export`."""
    parser = actions.add_parser("export", help="write the weights as other projects' files")
    add_place(parser)
    parser.add_argument("target", metavar="TARGET", help="the file, or folder, to make")
    parser.add_argument("--format", choices=("safetensors", "huggingface", "pt", "dcp", "deepspeed"), required=True)
    parser.add_argument("--dtype", choices=_DTYPES, help="write floating-point tensors in this dtype")
    parser.add_argument("--file-size", type=_bytes, default=5 * 10**9, metavar="SIZE", help="huggingface: at most (5G)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the files and print their names."""
    import torch

    from sheer.checkpoint import Reader
    from sheer.checkpoint.formats import Weights

    index = open_ours(args.directory, args.tag)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    total = sum(entry.nbytes for key, entry in index.entries() if key.kind in ("param", "buffer"))
    with progress(f"exporting {index.tag}", total) as advance, Reader(index, told=advance) as reader:
        files = _writer(args)(Weights(index, reader, dtype=dtype), Path(args.target))
    sizes = {str(file): file.stat().st_size for file in files}
    if args.json:
        print(json.dumps({"from": str(index.directory), "files": sizes}, indent=2))
    else:
        print("\n".join(f"{file}: {size(nbytes)}" for file, nbytes in sizes.items()))
    return 0


def _writer(args: argparse.Namespace) -> Callable[[Weights, Path], list[Path]]:
    from sheer.checkpoint.formats import dcp, deepspeed, hugging_face, safetensors_file, torch_file

    writers: dict[str, Callable[[Weights, Path], list[Path]]] = {
        "safetensors": safetensors_file.write,
        "huggingface": lambda weights, target: hugging_face.write(weights, target, most_bytes=args.file_size),
        "pt": torch_file.write,
        "dcp": dcp.write,  # with optimizer state, as the next
        "deepspeed": deepspeed.write,
    }
    return writers[args.format]


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or a number with K, M or G such as 5G")
    return int(match[1]) * _UNITS[match[2]]
