"""`sheer schedule`: who does what when in a pipeline, drawn or checked. Needs no processes and no torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sheer.cli.schedule.asked import costs, schedule
from sheer.schedule import GENERATORS, Timeline, problems, simulate, to_text, validate
from sheer.schedule.drawing import title, to_svg


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `schedule show` and `schedule check`."""
    parser = subparsers.add_parser("schedule", help="draw and check pipeline schedules")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    show = actions.add_parser("show", help="draw a schedule, with its bubble and what it holds")
    _add_schedule(show)
    show.add_argument(
        "--costs",
        default="",
        metavar="F=1,B=2",
        help="time per kind of action, or per piece of the model: F=1:2:1:1 (default: B 2, the others 1)",
    )
    show.add_argument("--latency", type=float, default=0.0, metavar="TIME", help="what a message takes (default: 0)")
    show.add_argument("--svg", type=Path, metavar="PATH", help="write the picture as SVG")
    show.add_argument("--png", type=Path, metavar="PATH", help="write the picture as PNG (needs matplotlib)")
    output = show.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print times and figures as JSON")
    output.add_argument(
        "--text", action="store_true", help="print the schedule as text, to change and to read in again"
    )
    show.set_defaults(run=run_show)
    check = actions.add_parser("check", help="say whether a schedule can run; if not, why, with exit status 1")
    _add_schedule(check)
    check.set_defaults(run=run_check)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "schedule", help=f"{', '.join(GENERATORS)}, a file with text or JSON, or FILE.py:FUNCTION of your own"
    )
    parser.add_argument("--stages", type=int, metavar="N", help="pipeline stages")
    parser.add_argument("--micro-batches", type=int, metavar="N", help="micro-batches of a step")
    parser.add_argument("--chunks", type=int, metavar="N", help="pieces of the model on each stage")


def run_show(args: argparse.Namespace) -> int:
    """Draw one schedule."""
    asked = validate(schedule(args))
    timeline = simulate(asked, cost=costs(args.costs, pieces=len(asked.placement)), latency=args.latency)
    if args.svg is not None:
        args.svg.write_text(to_svg(timeline), encoding="utf-8")
    if args.png is not None:
        from sheer.cli.schedule.png import write_png

        write_png(timeline, args.png)
    if args.json:
        print(json.dumps(_facts(timeline), indent=2))
    elif args.text:
        print(to_text(asked), end="")
    else:
        from rich.console import Console

        from sheer.cli.schedule.terminal import print_timeline

        print_timeline(timeline, Console(highlight=False))
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Say whether one schedule can run."""
    asked = schedule(args)
    found = problems(asked)
    if found:
        print("\n".join([f"'{asked.name}' cannot run:", *found]))
        return 1
    print(f"{title(simulate(asked))}: can run")
    return 0


def _facts(timeline: Timeline) -> dict[str, Any]:
    asked = timeline.schedule
    return {
        "name": asked.name,
        "stages": asked.stages,
        "chunks": asked.chunks,
        "micro_batches": asked.micro_batches,
        "placement": asked.placement,
        "length": timeline.length,
        "bubble": timeline.bubble,
        "bubbles": timeline.bubbles,
        "in_flight": timeline.in_flight,
        "critical": [{"stage": span.stage, "action": str(span.action)} for span in timeline.critical],
        "spans": [
            [{"action": str(span.action), "start": span.start, "end": span.end} for span in spans]
            for spans in timeline.spans
        ],
    }
