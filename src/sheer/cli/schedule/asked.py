"""The schedule and the costs that a command line asks for."""

from __future__ import annotations

import argparse
import math
import runpy
from pathlib import Path

from sheer.errors import UsageError, did_you_mean
from sheer.schedule import GENERATORS, Cost, Kind, Schedule, by_name, custom, equal_cost, parse


def schedule(args: argparse.Namespace) -> Schedule:
    """The schedule of that name, in that file or from that function. Raises UsageError; does not validate it."""
    name: str = args.schedule
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_function(Path(path), function, args)
    if name not in GENERATORS and not Path(name).exists():
        near = did_you_mean(name, GENERATORS)
        raise UsageError(f"there is no schedule and no file '{name}'; there are {', '.join(GENERATORS)}.{near}")
    if name in GENERATORS:
        return by_name(name, *_sizes(args), chunks=args.chunks)
    for option, value in {
        "--stages": args.stages,
        "--micro-batches": args.micro_batches,
        "--chunks": args.chunks,
    }.items():
        if value is not None:
            raise UsageError(f"{option} is for schedules by name; the file '{name}' says it itself")
    try:
        return parse(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read '{name}': {error}") from error


def costs(text: str, *, pieces: int) -> Cost:
    """What `F=1,B=2:3` means for a model of so many pieces: one time for all of them, or one for each."""
    times: dict[Kind, list[float]] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = entry.partition("=")
        try:
            kind, numbers = Kind(key.strip()), [float(number) for number in value.split(":")]
        except ValueError:
            allowed = ", ".join(kind.value for kind in Kind)
            raise UsageError(f"--costs: '{entry}' is no cost; write F=1 or F=1:2, with one of {allowed}") from None
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise UsageError(f"--costs: '{entry}' has a time that is negative or no number")
        if len(numbers) not in (1, pieces):
            raise UsageError(
                f"--costs: '{entry}' has {len(numbers)} times; give one, or one for each of {pieces} pieces"
            )
        times[kind] = numbers * pieces if len(numbers) == 1 else numbers
    return lambda kind, virtual: times[kind][virtual] if kind in times else equal_cost(kind, virtual)


def _from_function(path: Path, function: str, args: argparse.Namespace) -> Schedule:
    """What the user's function of stages, micro-batches and, where asked for, chunks returns."""
    if not path.exists():
        raise UsageError(f"there is no file '{path}'")
    made = runpy.run_path(str(path)).get(function)
    if made is None:
        raise UsageError(f"'{path}' has no function '{function}'")
    sizes = _sizes(args) if args.chunks is None else (*_sizes(args), args.chunks)
    result = made(*sizes)
    return result if isinstance(result, Schedule) else custom(result, name=function)


def _sizes(args: argparse.Namespace) -> tuple[int, int]:
    if args.stages is None or args.micro_batches is None:
        raise UsageError(f"'{args.schedule}' needs --stages and --micro-batches")
    return args.stages, args.micro_batches
