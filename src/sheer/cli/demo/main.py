"""The demo from start to end: check, train, look at the result, say what was done."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from sheer.cli.demo import folder as run_folder
from sheer.cli.demo.face import Face
from sheer.cli.demo.finish import Findings, check_picture_library, excerpt, finish
from sheer.cli.demo.folder import Folder
from sheer.cli.demo.knobs import Knobs
from sheer.cli.demo.launch import Ending, Outcome, Workers, heard_signals, watch
from sheer.errors import CompileError

LOG_LINES = 12
"""How much of a failed worker's log is shown."""


def run(args: argparse.Namespace) -> int:
    """`sheer demo`: the process's exit status."""
    knobs = Knobs.of(args)
    check_compiler(knobs)
    if args.picture:
        check_picture_library()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    root = Path(args.out)
    run_folder.make_root(root)
    with Folder(root).locked() as lock:
        if args.fresh:
            run_folder.clear(root)
        folder = run_folder.prepare(root, knobs=knobs)
        if steps_done(folder) == knobs.steps:
            console.print(
                f"The run in {root} is finished; its sample and picture are made again (--fresh starts over)."
            )
        else:
            ending = train(folder, knobs, save_every=args.save_every, lock=lock, console=console)
            if ending.outcome is not Outcome.FINISHED:
                return explain(ending, folder, knobs, fresh=args.fresh)
        tell(console, folder, finish(folder, knobs, picture=args.picture), picture=args.picture)
    return 0


def check_compiler(knobs: Knobs) -> None:
    """Raise CompileError where inductor has no C++ compiler; every other question about it the workers answer."""
    if not knobs.compile or knobs.backend != "inductor":
        return
    # Inductor's own rule: the variable CXX, else the system's usual compiler.
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is None:
        raise CompileError(
            f"torch.compile's backend 'inductor' needs a C++ compiler, and {name!r} is not on the PATH;"
            " install it, name another in the variable CXX, or pass --no-compile"
        )


def steps_done(folder: Folder) -> int:
    """Steps at which the last checkpoint stands; 0 without one."""
    if not folder.has_checkpoint:
        return 0
    from sheer.checkpoint import open_checkpoint, read_state

    step: int = read_state(open_checkpoint(folder.checkpoints))["client_state"]["step"]
    return step


def train(folder: Folder, knobs: Knobs, *, save_every: int, lock: int, console: Console) -> Ending:
    """Train to the last step, or until something ends it."""
    run_folder.replace_text(folder.config, json.dumps(knobs.engine_config(), indent=2) + "\n")
    how = f"compiled ({knobs.backend})" if knobs.compile else "eager"
    console.print(
        f"Training on {knobs.processes} process(es), ZeRO-{knobs.stage}, {knobs.precision}, {how}; in {folder.root}"
    )
    began = time.monotonic()
    face = Face(console, steps=knobs.steps, tokens_per_step=knobs.batch * knobs.context, compiles=knobs.compile)
    with (
        heard_signals() as wish,
        Workers(folder, count=knobs.processes, save_every=save_every, lock=lock) as workers,
        face,
    ):
        ending = watch(workers, wish, show=face.show)
    if ending.outcome is Outcome.FINISHED:
        console.print(f"Trained to step {knobs.steps}; this took {time.monotonic() - began:.0f} s.")
    return ending


def explain(ending: Ending, folder: Folder, knobs: Knobs, *, fresh: bool) -> int:
    """Say on stderr why training ended early, where it stands and how to go on; the exit status."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    status = 1
    if ending.outcome is Outcome.FAILED:
        console.print(f"sheer demo: error: {ending.complaint}")
        if tail := log_tail(folder, knobs):
            console.print(tail)
    else:
        assert ending.signal is not None
        console.print(f"Stopped by {signal.Signals(ending.signal).name}.")
        status = 128 + ending.signal
    again = "the same command" + (" without --fresh" if fresh else "")
    saved = steps_done(folder)
    if saved:
        console.print(f"The last checkpoint is of step {saved} of {knobs.steps}; {again} goes on from there.")
    elif ending.outcome is not Outcome.FAILED:
        console.print(f"There is no checkpoint yet; {again} starts again.")
    return status


def log_tail(folder: Folder, knobs: Knobs) -> str:
    """The end of each worker's log that holds anything."""
    parts = []
    for rank in range(knobs.processes):
        lines = folder.log(rank).read_text(errors="replace").splitlines()
        if lines:
            parts.append("\n".join([f"--- the end of {folder.log(rank)}", *lines[-LOG_LINES:]]))
    return "\n".join(parts)


def tell(console: Console, folder: Folder, findings: Findings, *, picture: bool) -> None:
    """Say what was done and where it lies."""
    console.print(
        f"Loaded the checkpoint in one process, uncompiled, with plain PyTorch.\n"
        f"Loss in nats per byte: {findings.first_loss:.2f} at the first step, {findings.last_loss:.2f} at the end,"
        f" {findings.validation_loss:.2f} on text it has not seen. It writes:\n\n{excerpt(findings.sample)}\n"
    )
    lines = [
        ("checkpoint", folder.checkpoints),
        ("loss curve", folder.curve),
        ("config", folder.config),
        ("sample", folder.sample),
    ]
    if picture:
        lines.append(("picture", folder.picture))
    for what, path in lines:
        console.print(f"  {what:<11} {path}")
