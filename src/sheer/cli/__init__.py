"""The `sheer` command. Each sub-command is a module with `register(subparsers)`, imported only when it is needed."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from sheer.errors import SheerError

# Name of the sub-command -> the module that registers it.
COMMANDS = {
    "demo": "sheer.cli.demo",
    "config": "sheer.cli.config",
    "ckpt": "sheer.cli.ckpt",
    "compile-report": "sheer.cli.compile_report",
    "schedule": "sheer.cli.schedule",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `sheer` command with `argv` (default: the process's arguments) and return its exit status.

    0: done; 1: the work failed; 2: the request was wrong; 130: interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parsed = _parser(arguments).parse_args(arguments)
    try:
        status = int(parsed.run(parsed))
        sys.stdout.flush()
        return status
    except SheerError as error:
        print(f"sheer: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sheer: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has left (`sheer ... | head`). What is still buffered goes nowhere, without a second complaint.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for `arguments`: where the first names a sub-command, only that one's module is imported."""
    parser = argparse.ArgumentParser(prog="sheer", description="Train, look at and check with Sheer.")
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    named = [name for name in arguments[:1] if name in COMMANDS]
    for name in named or COMMANDS:
        importlib.import_module(COMMANDS[name]).register(subparsers)
    return parser


def _version() -> str:
    from sheer import __version__

    return f"sheer {__version__}"
