"""`sheer compile-report script.py ...`: run a training script and write down what was compiled in it.

Each engine's report announces itself by an audit event (`sys.audit`), so that the library keeps no list of them: here,
and only here, somebody listens. The script runs in this process, as `python script.py ...` would run it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sheer.errors import UsageError

if TYPE_CHECKING:
    from sheer.compiler import Report


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `compile-report`."""
    parser = subparsers.add_parser(
        "compile-report",
        help="run a script and write a page on what was compiled",
        description="Run a training script, print what its engines compiled, and write it as one HTML page."
        " With several ranks (torchrun --no-python sheer compile-report script.py) rank 0 reports.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("compile-report.html"), help="the page (default: compile-report.html)"
    )
    parser.add_argument("script", help="a Python file; what follows it are its own arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Run the script; then, also where it failed, print and write the report. Gives the script's exit status."""
    if not Path(args.script).is_file():
        raise UsageError(f"there is no script {args.script!r}; give the path of a Python file")
    if not args.out.parent.is_dir():
        raise UsageError(f"--out {str(args.out)!r}: there is no folder {str(args.out.parent)!r}; make it first")
    reports = _listen()
    try:
        return _run(args.script, args.arguments)
    finally:
        if os.environ.get("RANK", "0") == "0":
            _write(reports, args.out, title=f"Compile report: {Path(args.script).name}")


def _listen() -> list[Report]:
    """The reports made in this process from now on. An audit hook stays for the rest of the process."""
    from sheer.compiler import AUDIT_EVENT

    reports: list[Report] = []

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == AUDIT_EVENT:
            reports.append(arguments[0])

    sys.addaudithook(hear)
    return reports


def _run(script: str, arguments: list[str]) -> int:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()  # as Python would; the report is worth having all the more
        return 1
    return 0


def _write(reports: list[Report], out: Path, *, title: str) -> None:
    from sheer.compiler import render

    switched_on = [report for report in reports if report.active or report.compiled or report.fallbacks]
    out.write_text(render(switched_on, title=title), encoding="utf-8")
    for report in switched_on:
        print(report)
    if not switched_on:
        print('No engine compiled anything. Is "compile": {"enabled": true} in its config?')
    print(f"Written to {out}")
