"""One process of the demo's training: builds the model and the engine, goes on from the last checkpoint, trains.

Run by the launcher as `python -m sheer.cli.demo.worker FOLDER SAVE_EVERY PIPE`.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sheer.cli.demo import examples
from sheer.cli.demo.folder import Curve, Folder, Point
from sheer.cli.demo.knobs import Knobs, accelerators
from sheer.cli.demo.link import Orders, Reporter
from sheer.errors import DataError, SheerError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from sheer.engine import Engine


class Job(NamedTuple):
    """What this worker was asked to do."""

    folder: Folder
    knobs: Knobs
    save_every: int


class Start(NamedTuple):
    """Where training begins."""

    step: int
    """Steps already done."""
    text: str
    """Digest of the training text."""


def build_model(knobs: Knobs) -> nn.Module:
    """The example model at the demo's size, from its seed."""
    import torch

    gpt = examples.load("gpt")
    torch.manual_seed(knobs.seed)
    size = gpt.GPTConfig(context=knobs.context, width=knobs.width, layers=knobs.layers, heads=knobs.heads)
    model: nn.Module = gpt.GPT(size)
    return model


def main() -> int:
    """Do the launcher's job; an error the user can mend goes to the launcher as one event."""
    orders = Orders()
    root, save_every, pipe = sys.argv[1:]
    folder = Folder(Path(root))
    job = Job(folder, Knobs.from_json(folder.knobs.read_text()), int(save_every))
    reporter = Reporter(int(pipe))
    try:
        run(job, orders=orders, reporter=reporter)
    except SheerError as error:
        reporter.error(str(error))
        return 2
    return 0


def run(job: Job, *, orders: Orders, reporter: Reporter) -> None:
    """Train from the last checkpoint to the last step, or to the boundary at which a stop is asked for."""
    import torch

    import sheer

    torch.set_num_threads(1)
    check_accelerators(job.knobs)
    text = examples.load("text")
    corpus = text.standard_library()
    windows = text.Windows(corpus.train, job.knobs.context)
    model = build_model(job.knobs)
    engine, *_ = sheer.initialize(model=model, config=job.folder.config, training_data=windows)
    try:
        start = resume(engine, job.folder, digest=hashlib.sha256(corpus.train.numpy()).hexdigest())
        speaks = engine.rank == 0
        if speaks:
            size = sum(parameter.numel() for parameter in model.parameters())
            reporter.tell("ready", step=start.step, parameters=size, text_bytes=len(corpus.train))
        train(engine, job, start=start, orders=orders, reporter=reporter if speaks else None)
    finally:
        engine.destroy()


def check_accelerators(knobs: Knobs) -> None:
    """Raise UsageError where several processes would have to share one accelerator."""
    count = accelerators()
    if count is not None and count < knobs.processes:
        raise UsageError(
            f"--processes {knobs.processes} needs as many accelerators, and this machine has {count};"
            f" pass --processes {count}"
        )


def resume(engine: Engine, folder: Folder, *, digest: str) -> Start:
    """Load the last checkpoint where there is one; raises DataError where it was trained on another text."""
    if not folder.has_checkpoint:
        return Start(0, digest)
    _, state = engine.load_checkpoint(folder.checkpoints)
    assert state is not None  # the demo saves it with every checkpoint
    if state["text"] != digest:
        raise DataError(
            f"{folder.root} was trained on the standard library of another Python; run the demo with that one,"
            " pass --fresh to start over, or --out with another folder"
        )
    return Start(state["step"], digest)


def train(engine: Engine, job: Job, *, start: Start, orders: Orders, reporter: Reporter | None) -> None:
    """The training loop. `reporter` is given on one rank, which also keeps the curve."""
    from sheer.comm import data_axis

    ranks = data_axis()
    curve = Curve(job.folder.curve, upto=start.step) if reporter else None
    for step in range(start.step + 1, job.knobs.steps + 1):
        engine.train_batch()
        result = engine.last_step
        assert result is not None
        if reporter and curve:
            point = Point(step, number(result.loss), number(result.grad_norm), result.lr[0])
            curve.append(point)
            reporter.tell("step", **point._asdict())
        # A stop reaches the workers at different moments; together they leave at the same step.
        stopping = any(ranks.gather_objects(orders.stop))
        if stopping or step % job.save_every == 0 or step == job.knobs.steps:
            if curve:
                curve.sync()
            engine.save_checkpoint(job.folder.checkpoints, client_state={"step": step, "text": start.text})
        if stopping:
            break
    if curve:
        curve.close()


def number(value: float | None) -> float:
    """`value`, or not-a-number where the step had none to tell."""
    return float("nan") if value is None else value


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All that matters is on the disk. A thread of gloo that still lets go of a tensor while the interpreter is being
    # taken down would abort the process ("terminate called without an active exception"), so it is not taken down.
    os._exit(status)
