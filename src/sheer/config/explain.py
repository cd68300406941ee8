"""The resolved config as rows: which value, where it came from, who reads it, and what there is to say about it."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

from sheer.config.foreign import DIFFERENCES, Fate
from sheer.config.model import Config

_FOLLOWS = "follows from the other two batch numbers once the number of ranks is known"
_FOLLOWING = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Row(NamedTuple):
    """One key of a resolved config."""

    key: str
    value: Any
    source: str
    """"given", "default" or "auto"."""
    reader: str
    """The room that reads it; "nobody" for a key without effect."""
    remark: str


def explain(config: Config) -> list[Row]:
    """Every key of `config`, Sheer's own first, then the given keys of DeepSpeed that have no effect."""
    entries = config.catalogue().entries
    rows: list[Row] = []
    for path, entry in entries.items():
        if entry.fate is not Fate.ACTS:
            continue
        block, _, name = path.rpartition(".")
        holder = attrgetter(block)(config) if block else config
        if holder is not None:
            rows.append(Row(path, getattr(holder, name), _source(config, path), entry.reader, _remark(config, path)))
        elif entry.required:  # once for a whole section that is not there
            rows.append(Row(block, None, "default", entry.reader, "not given"))
    rows += [_auto_argument(config, path) for path in config.auto if path not in entries]
    for path, remark in config.without_effect.items():
        source = "auto" if path in config.auto else "given"
        rows.append(Row(path, config.origin.foreign.get(path, "auto"), source, "nobody", remark))
    return rows


def _source(config: Config, path: str) -> str:
    if path in config.auto:
        return "auto"
    return "given" if path in config.origin.given else "default"


def _auto_argument(config: Config, path: str) -> Row:
    """The row of an "auto" inside `params`, which is no key of its own."""
    reader = config.catalogue().entries[path.rpartition(".")[0]].reader
    return Row(path, "auto", "auto", reader, "left to the default of the class")


def _remark(config: Config, path: str) -> str:
    notes = config.origin.notes
    remarks = [notes[place] for place in (path, path.partition(".")[0]) if place in notes]
    difference = DIFFERENCES.get(path)
    if difference is not None and _shows(config, path):
        remarks.append(f"differs from DeepSpeed: {difference.ours}; there {difference.theirs}. {difference.why}")
    if path in _FOLLOWING and getattr(config, path) is None:
        remarks.append(_FOLLOWS)
    return " ".join(dict.fromkeys(remarks))


def _shows(config: Config, path: str) -> bool:
    """Whether the difference at `path` touches this config: a default that was not overruled, or the name Adam."""
    if path != "optimizer.type":
        return path not in config.origin.given
    optimizer = config.optimizer
    return optimizer is not None and optimizer.type.lower() == "adam" and "adam_w_mode" not in optimizer.params
