"""`sheer demo`: trains a byte-level GPT on the source text of Python's standard library, and shows what came of it.

knobs.py    what can be asked for           launch.py   starts and watches the workers
folder.py   what lies on disk               worker.py   one process of the training
examples.py finds the example model         link.py     what launcher and workers say to each other
face.py     the progress bar                finish.py   plain load, sample, picture
"""

from __future__ import annotations

import argparse

DESCRIPTION = """
Trains a byte-level GPT (examples/gpt.py, plain PyTorch) on the source text of the Python standard library:
2 processes, ZeRO-2, compiled. Then loads the checkpoint in one process with plain PyTorch, writes a sample and a
picture of the loss curve. Interrupt it and run it again: it goes on from its last checkpoint.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `sheer demo`."""
    from sheer.cli.demo.knobs import add_arguments, at_least

    parser = subparsers.add_parser("demo", help="train a small language model in two minutes", description=DESCRIPTION)
    add_arguments(parser)
    parser.add_argument("--out", default="runs/demo", metavar="FOLDER", help="where to write (default runs/demo)")
    parser.add_argument("--save-every", type=at_least(1), default=100, metavar="N", help="steps (default 100)")
    parser.add_argument("--fresh", action="store_true", help="start over, removing the run in --out")
    parser.add_argument("--no-picture", dest="picture", action="store_false", help="draw no picture (no matplotlib)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from sheer.cli.demo.main import run

    return run(args)
