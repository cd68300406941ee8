"""The demo's knobs: one frozen record, read from the command line and checked before anything starts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sheer.errors import ConfigError

PRECISIONS = ("fp32", "bf16", "fp16")
WARMUP_SHARE = 0.1


@dataclass(frozen=True)
class Knobs:
    """What decides the numbers of a run. Two runs with equal knobs give equal curves."""

    steps: int = 480
    batch: int = 16
    context: int = 128
    width: int = 192
    layers: int = 4
    heads: int = 6
    lr: float = 3e-3
    stage: int = 2
    precision: str = "fp32"
    compile: bool = True
    backend: str = "inductor"
    processes: int = 2
    seed: int = 1234

    @classmethod
    def of(cls, args: argparse.Namespace) -> Knobs:
        """The knobs in parsed arguments; raises ConfigError where they do not fit together."""
        given = {field.name: getattr(args, field.name) for field in fields(cls)}
        if given["processes"] is None:
            given["processes"] = default_processes()
        knobs = cls(**given)
        knobs._check()
        return knobs

    def _check(self) -> None:
        if self.width % self.heads:
            raise ConfigError(f"--width {self.width} is not a multiple of --heads {self.heads}: change one of them")
        if self.batch % self.processes:
            raise ConfigError(
                f"--batch {self.batch} (sequences per step, all processes together) is not a multiple of"
                f" --processes {self.processes}: change one of them"
            )

    def engine_config(self) -> dict[str, Any]:
        """The engine's configuration, with DeepSpeed's key names."""
        warmup = max(1, int(self.steps * WARMUP_SHARE))
        schedule = {
            "total_num_steps": self.steps,
            "warmup_num_steps": warmup,
            "warmup_type": "linear",
            "cos_min_ratio": 0.05,
        }
        config: dict[str, Any] = {
            "train_batch_size": self.batch,
            "train_micro_batch_size_per_gpu": self.batch // self.processes,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": self.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupCosineLR", "params": schedule},
            "zero_optimization": {"stage": self.stage},
            "compile": {"enabled": self.compile, "backend": self.backend},
            "checkpoint": {"keep_last": 2},
            "data_loader": {"shuffle": True, "seed": self.seed},
        }
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        return config

    def to_json(self) -> str:
        """One line of JSON; `from_json` is its inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Knobs:
        """The knobs that `to_json` wrote; raises ValueError or TypeError where `text` is something else."""
        return cls(**json.loads(text))

    def differences(self, other: Knobs) -> list[str]:
        """How `other` differs, one readable item per knob."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{option(name)} was {mine[name]}, now {theirs[name]}" for name in mine if mine[name] != theirs[name]]


def option(name: str) -> str:
    """The command-line spelling of the knob `name`."""
    return "--no-compile" if name == "compile" else f"--{name}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an option for every knob."""
    sizes: Mapping[str, tuple[int, str]] = {
        "steps": (1, "optimizer steps to train"),
        "batch": (1, "sequences per step, all processes together"),
        "context": (2, "bytes per sequence"),
        "width": (1, "width of the model"),
        "layers": (1, "transformer blocks"),
        "heads": (1, "attention heads; --width must be a multiple"),
        "seed": (0, "seed of the weights and of the order of the data"),
    }
    for name, (least, text) in sizes.items():
        default = getattr(Knobs, name)
        parser.add_argument(
            option(name), type=at_least(least), default=default, metavar="N", help=f"{text} (default {default})"
        )
    parser.add_argument(
        "--processes",
        type=at_least(1),
        metavar="N",
        help=f"processes to train on, one thread each (default {Knobs.processes}, or 1 on a single accelerator)",
    )
    parser.add_argument(
        "--lr", type=positive, default=Knobs.lr, metavar="X", help=f"peak learning rate (default {Knobs.lr})"
    )
    parser.add_argument(
        "--stage", type=_stage, default=Knobs.stage, metavar="{0,1,2,3}", help=f"ZeRO stage (default {Knobs.stage})"
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default=Knobs.precision, help=f"of the model (default {Knobs.precision})"
    )
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="train in eager mode; needs no C++ compiler"
    )
    parser.add_argument(
        "--backend", default=Knobs.backend, metavar="NAME", help=f"torch.compile's backend (default {Knobs.backend})"
    )


def default_processes() -> int:
    """As many as a run has by default, but not more than there are accelerators to share out."""
    count = accelerators()
    return Knobs.processes if count is None else min(Knobs.processes, count)


def accelerators() -> int | None:
    """How many this machine has; None where there are none, and processes share the CPU."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else None


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from `least` up."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; the least is {least}")
        return value

    return number


def positive(text: str) -> float:
    """An argparse type: finite numbers above zero."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value


def _stage(text: str) -> int:
    value = at_least(0)(text)
    if value > 3:
        raise argparse.ArgumentTypeError(f"{value} is no stage; choose 0, 1, 2 or 3")
    return value
