"""`sheer config`: check a config file, explain it, print the JSON schema. A bad file raises, and exits with 2."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sheer.config import Config
    from sheer.config.explain import Row


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `config check`, `config explain` and `config schema`."""
    parser = subparsers.add_parser("config", help="check or explain a config file, or print the JSON schema")
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    check = actions.add_parser("check", help="say what is wrong with a file; exit code 2 if anything is")
    check.add_argument("file", help="path to a JSON config")
    check.add_argument(
        "--ranks", type=_ranks, metavar="N", help="also resolve the batch sizes for N data-parallel ranks"
    )
    check.set_defaults(run=run_check)

    explain = actions.add_parser("explain", help="print the resolved config: value, source, who reads it, remarks")
    explain.add_argument("file", help="path to a JSON config")
    explain.add_argument("--json", action="store_true", help="as a JSON list of rows")
    explain.set_defaults(run=run_explain)

    schema = actions.add_parser("schema", help="print the JSON schema of a config file, for editors")
    schema.set_defaults(run=run_schema)


def run_check(args: argparse.Namespace) -> int:
    """Print `ok`, with the batch sizes where a number of ranks was given."""
    from sheer.config import Config, resolve_batch

    config = Config.load(args.file)
    _check_what_it_names(config)
    said = f"{args.file}: ok"
    if args.ranks is None:
        _check_batch_for_some_ranks(config)
    else:
        sizes = resolve_batch(config, args.ranks)
        said += f"; train_batch_size {sizes.train} = micro-batch {sizes.micro} * accumulation {sizes.accumulation}"
        said += f" * ranks {args.ranks}"
    print(said)
    return 0


def run_explain(args: argparse.Namespace) -> int:
    """Print every key of the resolved config as a table or as JSON."""
    from sheer.config import Config
    from sheer.config.explain import explain

    rows = explain(Config.load(args.file))
    if args.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        _print_table(rows)
    return 0


def run_schema(args: argparse.Namespace) -> int:
    """Print the JSON schema."""
    from sheer.config.schema import json_schema

    print(json.dumps(json_schema(), indent=2, allow_nan=False))
    return 0


def _ranks(text: str) -> int:
    from sheer.cli.demo.knobs import at_least

    return at_least(1)(text)


def _check_what_it_names(config: Config) -> None:
    """Raise ConfigError where optimizer or schedule is not known or cannot be built; import paths are not imported."""
    from sheer.errors import ConfigError

    named = [one for one in (config.optimizer, config.scheduler) if one is not None and "." not in one.type]
    problems = []
    for section in named:
        try:
            _try_out(section.type, section.params, schedule=section is config.scheduler)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _try_out(name: str, params: Mapping[str, Any], *, schedule: bool) -> None:
    import torch

    from sheer.optim.registry import optimizer_factory
    from sheer.optim.schedules import build_scheduler

    if not schedule:
        optimizer_factory(name, params)
        return
    # A list may have one value for each parameter group, and how many there will be the file does not say.
    groups = max([1, *(len(value) for value in params.values() if isinstance(value, list))])
    tensors = [torch.zeros(1, requires_grad=True) for _ in range(groups)]
    build_scheduler(name, params, torch.optim.AdamW([{"params": [tensor]} for tensor in tensors]))


def _check_batch_for_some_ranks(config: Config) -> None:
    """Raise ConfigError where the batch sizes fit no number of ranks."""
    from sheer.config import resolve_batch

    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    unit = (micro or 1) * (config.gradient_accumulation_steps or 1)
    # Where some number fits, train / unit does; where none does, the error for one rank says why.
    resolve_batch(config, train // unit if train and train % unit == 0 else 1)


def _print_table(rows: list[Row]) -> None:
    from rich.table import Table
    from rich.text import Text

    from sheer.cli.table import print_table
    from sheer.config.kinds import show

    table = Table("key", "value", "source", "read by", "remarks", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        style = {"given": "", "auto": "cyan", "default": "dim"}[row.source]
        cells = (row.key, show(row.value), row.source, row.reader, row.remark)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells), style=style)
    print_table(table)
