"""After training: the checkpoint in one process, in eager mode, with plain PyTorch; a sample; a picture."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sheer.cli.demo import examples
from sheer.cli.demo.folder import Folder, Point, read_curve, replace_text
from sheer.cli.demo.knobs import Knobs
from sheer.cli.demo.worker import build_model
from sheer.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

VALIDATION_BYTES = 1 << 16
"""How much of the validation text is evaluated."""
PROMPT = b"def "
SAMPLE_BYTES = 480


class Findings(NamedTuple):
    """What the finished run shows."""

    first_loss: float
    last_loss: float
    """Mean of the last tenth of the training steps."""
    validation_loss: float
    """In nats per byte, on text the model was not trained on."""
    sample: str


def check_picture_library() -> None:
    """Raise UsageError where the picture cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("the picture of the loss curve needs matplotlib: pip install matplotlib, or pass --no-picture")


def finish(folder: Folder, knobs: Knobs, *, picture: bool) -> Findings:
    """Load the trained model with plain PyTorch, evaluate it, and write the sample and the picture."""
    import torch

    # The model is small: on a busy machine, threads that wait for each other cost more than they give.
    torch.set_num_threads(1)
    model = load_plain(folder, knobs)
    curve = read_curve(folder.curve)
    validation = validation_loss(model, knobs)
    sample = write_sample(model, seed=knobs.seed)
    replace_text(folder.sample, sample)
    if picture:
        draw(curve, validation=validation, path=folder.picture)
    tail = [point.loss for point in curve[-max(1, len(curve) // 10) :]]
    return Findings(curve[0].loss, sum(tail) / len(tail), validation, sample)


def load_plain(folder: Folder, knobs: Knobs) -> nn.Module:
    """The example model with the checkpoint's weights, in this one process: no engine, no compilation."""
    from sheer.checkpoint import load_full

    model = build_model(knobs)
    model.load_state_dict(load_full(folder.checkpoints))
    return model.eval()


def validation_loss(model: nn.Module, knobs: Knobs) -> float:
    """Mean loss over the head of the validation text."""
    import torch

    text = examples.load("text")
    windows = text.Windows(text.standard_library().validation[: VALIDATION_BYTES + 1], knobs.context)
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        for first in range(0, len(windows), 64):
            batch = [windows[index] for index in range(first, min(first + 64, len(windows)))]
            tokens, targets = (torch.stack([item[key] for item in batch]) for key in ("tokens", "targets"))
            losses.append(model(tokens, targets) * len(batch))
    return float(torch.stack(losses).sum()) / len(windows)


def write_sample(model: nn.Module, *, seed: int) -> str:
    """Text the model writes after the prompt, the same for the same weights and seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    written: bytes = examples.load("gpt").generate(model, PROMPT, count=SAMPLE_BYTES, generator=generator)
    return written.decode(errors="replace")


def draw(curve: Sequence[Point], *, validation: float, path: Path) -> None:
    """The loss curve as a PNG: every step, smoothed, and the validation loss at the end."""
    from matplotlib.figure import Figure

    steps = [point.step for point in curve]
    losses = [point.loss for point in curve]
    figure = Figure(figsize=(7.2, 4.0), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#9bb8d3", linewidth=0.8, label="training, each step")
    axes.plot(steps, smooth(losses), color="#1f4e79", linewidth=1.8, label="training, smoothed")
    axes.plot([steps[-1]], [validation], "o", color="#c8553d", label=f"validation at the end: {validation:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A byte-level GPT on Python's standard library")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)


def smooth(values: Sequence[float], *, reach: int = 10) -> list[float]:
    """Mean of each value and up to `reach` neighbours on either side, equally many on both."""
    means = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        window = values[index - near : index + near + 1]
        means.append(sum(window) / len(window))
    return means


def excerpt(sample: str, *, lines: int = 12, width: int = 100) -> str:
    """The first lines of the sample, cut to `width` characters and indented."""
    return textwrap.indent("\n".join(line[:width] for line in sample.splitlines()[:lines]), "    ")
