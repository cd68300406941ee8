"""From the dict a user gave to the values of Sheer's own fields, with every problem on the way collected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sheer.config.catalogue import Catalogue, Entry, holds_auto
from sheer.config.foreign import ALIASES, AUTO, Fate
from sheer.config.kinds import describe, show
from sheer.errors import did_you_mean

_FEW = 12
"""So many names fit into an error."""


class Reading(NamedTuple):
    """What a dict says, sorted."""

    values: dict[str, Any]
    """Nested values of the fields that Sheer acts on; "auto" is gone."""
    given: list[str]
    """Dotted paths of those fields."""
    auto: list[str]
    """Dotted paths that were "auto" and now have their default."""
    foreign: dict[str, Any]
    """DeepSpeed's other keys by dotted path, all accepted."""
    notes: dict[str, str]
    """Remarks on how something was spelled, by dotted path."""
    problems: list[str]


def read(given: Mapping[str, Any], *, catalogue: Catalogue) -> Reading:
    """Sort `given` into fields, accepted keys of DeepSpeed, and problems."""
    reading = Reading({}, [], [], {}, {}, [])
    spelled = _respell(given, reading=reading)
    resolved = resolve_auto(spelled, catalogue=catalogue, found=reading.auto)
    _read_block(resolved, block="", into=reading.values, catalogue=catalogue, reading=reading)
    return reading


def resolve_auto(
    given: Mapping[str, Any], *, catalogue: Catalogue, found: list[str], block: str = ""
) -> dict[str, Any]:
    """`given` without the keys that are "auto" where "auto" is understood, so that they take their default.

    This is the one place that resolves "auto": the paths it dropped are appended to `found`, and nothing later sees
    the word. An "auto" anywhere else stays, and is refused as a value of the wrong kind.
    """
    kept: dict[str, Any] = {}
    for name, value in given.items():
        path = f"{block}.{name}" if block else str(name)
        if isinstance(value, str) and value == "auto" and holds_auto(path):
            found.append(path)
        elif isinstance(value, Mapping) and (path in catalogue.blocks or f"{path}.*" in AUTO):
            kept[name] = resolve_auto(value, catalogue=catalogue, found=found, block=path)
        else:
            kept[name] = value
    return kept


def _respell(given: Mapping[str, Any], *, reading: Reading) -> dict[str, Any]:
    """`given` with the other spellings that DeepSpeed accepts brought to one: aliases of blocks, boolean ZeRO."""
    spelled: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own != name and own in given:
            reading.problems.append(f"{name}: is another name of {own}, which is given too. Keep one of them.")
            continue
        if own != name:
            reading.notes[own] = f"spelled {name!r}."
        spelled[own] = value
    if isinstance(spelled.get("zero_optimization"), bool):
        stage = int(spelled["zero_optimization"])
        spelled["zero_optimization"] = {"stage": stage}
        reading.notes["zero_optimization.stage"] = (
            f'a bare true or false is DeepSpeed\'s deprecated spelling; write {{"stage": {stage}}}.'
        )
    return spelled


def _read_block(
    given: Mapping[str, Any], *, block: str, into: dict[str, Any], catalogue: Catalogue, reading: Reading
) -> None:
    for name, value in given.items():
        path = f"{block}.{name}" if block else str(name)
        entry = catalogue.entries.get(path)
        if entry is not None and entry.fate is Fate.ACTS:
            into[name] = value
            reading.given.append(path)
        elif entry is not None:
            problem = _refusal(entry, value)
            if problem:
                reading.problems.append(f"{path}: {problem}")
            else:
                reading.foreign[path] = value
        elif path not in catalogue.blocks:
            reading.problems.append(f"{path}: {_unknown(str(name), block=block, catalogue=catalogue)}")
        elif isinstance(value, Mapping):
            inner = {} if catalogue.blocks[path] == "" else into.setdefault(name, {})
            _read_block(value, block=path, into=inner, catalogue=catalogue, reading=reading)
        elif value is not None:  # null is "no such block", as if it were not there
            reading.problems.append(f"{path}: must be an object {{...}}, or null, not {describe(value)}.")


def _refusal(entry: Entry, value: Any) -> str:
    """Why a key of DeepSpeed alone is refused with `value`; empty when it is accepted."""
    if not entry.kind.accepts(value):
        return entry.kind.why_not(value)
    if entry.fate is Fate.TUNES or entry.is_off(value):
        return ""
    feature, _, mend = entry.about.partition(": ")
    instead = f" Instead, {mend}." if mend else ""
    offs = [show(off) for off in entry.off if off not in ([], (), {})] or ["null"]
    off = '{"enabled": false}' if entry.gated else offs[0]
    if entry.fate is Fate.REMOVED:
        return f"{show(value)} asks for DeepSpeed's {feature}, which DeepSpeed itself has removed. Remove it.{instead}"
    return (
        f"{show(value)} asks for DeepSpeed's {feature}, which Sheer does not have. "
        f"Remove it or set it to {off}.{instead}"
    )


def _unknown(name: str, *, block: str, catalogue: Catalogue) -> str:
    """What to say about a key that nobody knows."""
    where = f"in {block!r}" if block else "at the top level"
    known = catalogue.children(block) + ([] if block else list(ALIASES))
    hint = did_you_mean(name, known)
    if not hint and len(known) <= _FEW:
        hint = f" Known there: {', '.join(repr(other) for other in known)}."
    places = catalogue.elsewhere(name)[:3]
    if places:
        hint += f" {' and '.join(repr(place) for place in places)} would be known."
    elif block in ("optimizer", "scheduler"):
        hint += f" Arguments of the class go into '{block}.params'."
    return f"unknown key {where}.{hint or ' See `sheer config schema` for every key.'}"


class Translation(NamedTuple):
    """pydantic's complaints in our words, and the values without what it complained about."""

    problems: list[str]
    values: dict[str, Any]


def translate(error: ValidationError, *, values: dict[str, Any], catalogue: Catalogue) -> Translation:
    """Word what pydantic found in `values`, and drop it, so that the rest can still be checked."""
    problems: list[str] = []
    pruned = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    for complaint in error.errors(include_url=False):
        names = [str(name) for name in complaint["loc"]]
        entry = catalogue.entries[".".join(names)]
        problems.append(f"{entry.path}: {_wording(complaint, entry=entry)}")
        if len(names) == 1 or entry.required:  # a section cannot stand without a required field
            pruned.pop(names[0], None)
        elif names[0] in pruned:
            pruned[names[0]].pop(names[1])
    return Translation(problems, pruned)


def _wording(complaint: ErrorDetails, *, entry: Entry) -> str:
    if complaint["type"] == "missing":
        return f"is missing; it must be {entry.kind.allowed}."
    reason = str(complaint["ctx"]["error"])
    return f'{reason} "auto" is not understood here.' if complaint["input"] == "auto" else reason
