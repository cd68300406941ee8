"""`sheer ckpt import`: other projects' weights as a checkpoint, for `load_checkpoint(..., load_module_only=True)`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sheer.checkpoint.formats import Foreign


def register(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ckpt import`."""
    parser = actions.add_parser("import", help="make a checkpoint of safetensors, a Hugging Face folder, or a .pt file")
    parser.add_argument("source", metavar="SOURCE", help="a .safetensors file, a folder of them, or a .pt file")
    parser.add_argument("directory", metavar="FOLDER", help="the directory of checkpoints to save to")
    parser.add_argument("--tag", default="imported", help="the new checkpoint's tag (default: imported)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Save the checkpoint and say what was made of the names."""
    from sheer.checkpoint import Alone, Shard, save

    foreign = _read(Path(args.source))
    shards = [
        Shard("param", name, tuple(tensor.shape), 0, tensor.contiguous().reshape(-1))
        for name, tensor in foreign.tensors.items()
    ]
    state: dict[str, Any] = {"counters": {}, "extra_state": {}, "client_state": {}}
    facts = {"ties": foreign.ties, "imported": str(args.source)}
    path = save(args.directory, args.tag, shards=shards, facts=facts, state=state, rng={}, axis=Alone())
    if args.json:
        said = {"checkpoint": str(path), "tensors": len(shards), "ties": foreign.ties, "said": foreign.said}
        print(json.dumps(said, indent=2))
        return 0
    print("\n".join([*foreign.said, f"{path}: {len(shards)} tensors, {len(foreign.ties)} tied names"]))
    return 0


def _read(source: Path) -> Foreign:
    from sheer.checkpoint.formats import hugging_face, safetensors_file, torch_file
    from sheer.errors import CheckpointError

    if not source.exists():
        raise CheckpointError(f"there is no {source}.")
    if source.is_dir():
        return hugging_face.read(source)
    named = source.suffix == ".safetensors"
    return safetensors_file.read(source) if named or _is_safetensors(source) else torch_file.read(source)


def _is_safetensors(source: Path) -> bool:
    """Whether the file begins as the format does: the length of its header in 8 bytes, then a JSON object."""
    with source.open("rb") as file:
        start = file.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") + 8 <= source.stat().st_size
