"""`sheer ckpt import`: what other projects saved as a checkpoint of ours; with its training state where it has one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sheer.cli.ckpt.common import progress

if TYPE_CHECKING:
    import torch

    from sheer.checkpoint import Shard
    from sheer.checkpoint.formats import Foreign

_READS = "a DeepSpeed or DCP checkpoint, a Hugging Face folder, a .safetensors or a .pt file"


def register(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ckpt import`."""
    parser = actions.add_parser("import", help=f"make a checkpoint of {_READS}")
    parser.add_argument("source", metavar="SOURCE", help="the file or folder")
    parser.add_argument("--source-tag", metavar="TAG", help="which checkpoint in SOURCE (default: the latest)")
    parser.add_argument("--weights-only", action="store_true", help="leave out optimizer state")
    parser.add_argument("directory", metavar="FOLDER", help="the directory of checkpoints to save to")
    parser.add_argument("--tag", default="imported", help="the new checkpoint's tag (default: imported)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Save the checkpoint and say what was made of the names."""
    from sheer.checkpoint import Alone, list_tags, save
    from sheer.errors import CheckpointError

    if args.tag in list_tags(args.directory):
        raise CheckpointError(
            f"{args.directory} has a checkpoint {args.tag!r}; name another by --tag, or remove it first."
        )
    foreign = _read(Path(args.source), args.source_tag)
    shards = [shard for shard in foreign.shards if not args.weights_only or shard.kind in ("param", "buffer")]
    facts = {**foreign.facts, "ties": foreign.ties, "imported": str(args.source)}
    _check_optimizer(args, facts)
    state = foreign.full_state
    with progress("importing", sum(shard.data.nbytes for shard in shards)) as advance:
        followed = [_followed(shard, advance) for shard in shards]
        path = save(args.directory, args.tag, shards=followed, facts=facts, state=state, rng={}, axis=Alone())
    tensors = len({shard.key for shard in shards})
    if args.json:
        said = {"checkpoint": str(path), "tensors": tensors, "ties": foreign.ties, "said": foreign.said}
        print(json.dumps(said, indent=2))
        return 0
    print("\n".join([*foreign.said, f"{path}: {tensors} tensors, {len(foreign.ties)} tied names"]))
    return 0


def _followed(shard: Shard, advance: Callable[[int], None]) -> Shard:
    """`shard`, telling of every part that is written."""

    def rest(part: torch.Tensor) -> None:
        shard.rest(part)
        advance(part.nbytes)

    return replace(shard, rest=rest)


def _read(source: Path, tag: str | None) -> Foreign:
    from sheer.checkpoint import find
    from sheer.checkpoint.formats import find_foreign
    from sheer.errors import CheckpointError

    found = find_foreign(source, tag)
    if found is None:
        what = "is not there"
        if source.exists():
            ours = source.is_dir() and find(source, tag) is not None
            what = "is a checkpoint of Sheer's already" if ours else "is nothing that this command reads"
        raise CheckpointError(f"{source if tag is None else source / tag} {what}. It reads {_READS}.")
    return found.read()


def _check_optimizer(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Refuse to leave out an optimizer state that is there, unless that is asked for."""
    from sheer.errors import CheckpointError

    reason = facts.get("optimizer", {}).pop("unreadable", None)
    if args.weights_only:
        facts.pop("optimizer", None)
    elif reason:
        raise CheckpointError(
            f"the optimizer state of {args.source} cannot be imported: {reason}. Load the folder with "
            "engine.load_checkpoint, or import with --weights-only."
        )
