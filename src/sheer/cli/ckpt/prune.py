"""`sheer ckpt prune`: remove all but the newest checkpoints, and what interrupted saves left."""

from __future__ import annotations

import argparse
import json


def register(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ckpt prune`."""
    parser = actions.add_parser("prune", help="remove all but the newest checkpoints, never the one `latest` names")
    parser.add_argument("directory", metavar="FOLDER", help="the directory of checkpoints")
    parser.add_argument("--keep", type=int, required=True, metavar="N", help="how many of the newest stay")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the tags that went and those that stay."""
    from sheer.checkpoint import list_tags, prune

    removed = prune(args.directory, keep=args.keep, dry_run=args.dry_run)
    kept = [tag for tag in list_tags(args.directory) if tag not in removed]
    if args.json:
        print(json.dumps({"removed": removed, "kept": kept, "dry_run": args.dry_run}, indent=2))
        return 0
    said = "would remove" if args.dry_run else "removed"
    print(f"{said} {len(removed)}: {', '.join(removed) or 'none'}\nkept {len(kept)}: {', '.join(kept) or 'none'}")
    return 0
