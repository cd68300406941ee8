"""One command: every suite, its table, and `docs/benchmarks.md` written from them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import checkpoint, compile, growth, memory, pipeline, profiles, replay, report, startup, step
from benchmarks.contenders import chosen
from benchmarks.report import Result
from benchmarks.step import Race
from benchmarks.workloads import WORKLOADS


class Effort(NamedTuple):
    """How much of it."""

    quick: bool
    only: tuple[str, ...]
    rounds: int | None
    seconds: float
    """Of each race's rounds; after that no further one."""


class Suite(NamedTuple):
    """One table of the page: any function of the effort that returns a Result."""

    title: str
    run: Callable[[Effort], Result]
    quick: bool = False
    """Whether `--quick` runs it too."""


def _race(race: Race, effort: Effort, *, quick_rounds: int, quick_steps: int | None = None) -> Result:
    """`race`, or with `--quick` as many rounds of it, each of as many steps (as otherwise, unless given)."""
    race = race._replace(seconds=effort.seconds)
    if effort.quick:
        race = race._replace(rounds=quick_rounds, steps=quick_steps or race.steps)
    if effort.rounds is not None:
        race = race._replace(rounds=effort.rounds)
    # Compiling takes every contender's processes long; one of each kind is raced.
    return step.run(race, only=effort.only, quick=effort.quick or race.compiled)


SUITES: dict[str, Suite] = {
    "step-gpt": Suite(
        "A GPT of 14 M parameters, eager",
        partial(_race, Race("gpt", rounds=8, steps=1), quick_rounds=3),
        quick=True,
    ),
    "step-gpt-compiled": Suite(
        "A GPT of 14 M parameters, both sides compiled",
        partial(_race, Race("gpt", compiled=True, rounds=9, steps=1), quick_rounds=3),
    ),
    "step-mlp": Suite(
        "100 Linear layers of width 64, two ranks",
        partial(_race, Race("mlp", rounds=11, steps=10), quick_rounds=3, quick_steps=5),
    ),
    "step-mlp-accumulation": Suite(
        "100 Linear layers of width 64, two ranks, four micro-batches a step",
        partial(_race, Race("mlp", accumulation=4, rounds=9, steps=5), quick_rounds=2, quick_steps=2),
    ),
    "step-conv": Suite(
        "A convolutional net with batch norm, two ranks",
        partial(_race, Race("conv", rounds=11, steps=5), quick_rounds=3),
    ),
    "step-small": Suite(
        "40 Linear layers of width 32, one rank",
        partial(_race, Race("small", ranks=1, rounds=21, steps=20), quick_rounds=9),
        quick=True,
    ),
    "step-blocks": Suite(
        "20 blocks of width 32, one rank",
        partial(_race, Race("blocks", ranks=1, rounds=21, steps=20), quick_rounds=9),
    ),
    "step-blocks-two": Suite(
        "20 blocks of width 32, two ranks",
        partial(_race, Race("blocks", rounds=11, steps=20), quick_rounds=3),
    ),
    "pipeline": Suite(
        "A pipeline of two stages",
        lambda effort: pipeline.run(pipeline.GPT, effort.rounds or (2 if effort.quick else 7)),
    ),
    "pipeline-tiny": Suite(
        "A pipeline of two stages, tiny micro-batches",
        lambda effort: pipeline.run(pipeline.TINY, effort.rounds or (3 if effort.quick else 15)),
    ),
    "gloo": Suite(
        "gloo's own share of a step",
        lambda effort: replay.run(workloads=["gpt", "mlp", "conv"], rounds=effort.rounds or (2 if effort.quick else 7)),
    ),
    "state": Suite("Model state in bytes", lambda _: memory.state()),
    "beyond": Suite("Memory beyond the model state", lambda _: memory.beyond()),
    "growth": Suite("The engine's own time as the model grows", lambda effort: growth.run(quick=effort.quick)),
    "planning": Suite("Planning for 1024 ranks and 10 000 parameters", lambda _: growth.planning(), quick=True),
    "checkpoint": Suite(
        "Saving and loading 1 GB", lambda effort: checkpoint.run(quick=effort.quick, rounds=effort.rounds)
    ),
    "compile": Suite("Compiling", lambda effort: compile.run(rounds=effort.rounds or 1)),
    "startup": Suite("Starting", lambda effort: startup.run(rounds=effort.rounds or (1 if effort.quick else 5))),
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", help=f"which; all by default: {', '.join(SUITES)}")
    parser.add_argument("--quick", action="store_true", help="a look in three minutes; writes nothing unless --write")
    parser.add_argument(
        "--only", nargs="+", default=[], help="contenders whose name contains one of these (and the raw loop)"
    )
    parser.add_argument("--rounds", type=int, help="of every race")
    parser.add_argument("--seconds", type=float, help="of each race's rounds, after setting up (quick: 20)")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, help="the page and the picture")
    parser.add_argument("--json", type=Path, help="raw samples go there")
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="no suite: profile steps of --only (Sheer by default)"
    )
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="gpt", help="what --profile trains")
    parser.add_argument("--ranks", type=int, default=2, help="of --profile")
    arguments = parser.parse_args()
    for name in arguments.suites:
        if name not in SUITES:
            parser.error(f"no suite {name!r}; there are {', '.join(SUITES)}")
    if arguments.seconds is None:
        arguments.seconds = 20.0 if arguments.quick else float("inf")
    if arguments.write is None:
        arguments.write = not arguments.quick and not arguments.only
    return arguments


def _show(name: str, result: Result, *, write: bool) -> None:
    print("\n".join(result.lines), flush=True)
    if not write:
        return
    lines = [f"    make bench ARGS={name}", "", *result.lines]
    if result.bars:
        picture = report.DOCS / f"bench-{name}.svg"
        picture.write_text(report.picture(SUITES[name].title + ", x raw loop", result.bars))
        lines += ["", f"![{SUITES[name].title}]({picture.name})"]
    report.write(name, lines)
    report.write("machine", report.machine())


def main() -> int:
    arguments = _arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if arguments.profile:
        names = chosen(arguments.only or ["Sheer"], quick=False, ranks=arguments.ranks)[1:]
        profiles.run(arguments.model, names=names, ranks=arguments.ranks, steps=5, folder=arguments.profile)
        return 0
    effort = Effort(arguments.quick, tuple(arguments.only), arguments.rounds, arguments.seconds)
    names = arguments.suites or [name for name, suite in SUITES.items() if suite.quick or not effort.quick]
    print("\n".join(report.machine()), flush=True)
    samples, wrong = {}, []
    for name in names:
        print(f"\n## {SUITES[name].title} ({name})\n", flush=True)
        begin = time.perf_counter()
        result = SUITES[name].run(effort)
        _show(name, result, write=arguments.write)
        print(f"\n({time.perf_counter() - begin:.0f} s)", flush=True)
        samples[name] = result.samples
        wrong += [f"{name}: {one}" for one in result.wrong]
    if arguments.json:
        arguments.json.write_text(json.dumps(samples))
    if wrong:
        print("\nnot measured, see the tables: " + "; ".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
