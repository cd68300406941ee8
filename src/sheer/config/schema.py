"""The JSON schema of a config file, for editors: every accepted key with its documentation, and no other."""

from __future__ import annotations

from sheer.config.catalogue import Catalogue, Entry
from sheer.config.foreign import ALIASES, DIFFERENCES, FOREIGN, Fate
from sheer.config.kinds import JsonSchema
from sheer.config.model import Config


def json_schema() -> JsonSchema:
    """A JSON schema (draft 2020-12) that accepts what `Config.load` accepts, key by key.

    What only several keys together can show (two precisions at once, a batch that does not divide) is beyond it.
    """
    schema = _object("", catalogue=Config.catalogue())
    for alias, name in ALIASES.items():
        schema["properties"][alias] = schema["properties"][name] | {"description": f"Another name of {name}."}
    whole = schema["properties"]["zero_optimization"]
    deprecated = {"type": "boolean", "deprecated": True, "description": "true is stage 1, false is stage 0."}
    schema["properties"]["zero_optimization"] = {"description": whole["description"], "anyOf": [whole, deprecated]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Sheer configuration",
    } | schema


def _object(block: str, *, catalogue: Catalogue) -> JsonSchema:
    """The schema of one block, its inner blocks included."""
    properties: dict[str, JsonSchema] = {}
    required: list[str] = []
    for name in catalogue.children(block):
        path = f"{block}.{name}" if block else name
        entry = catalogue.entries.get(path)
        if entry is None:
            properties[name] = _object(path, catalogue=catalogue) | {"type": ["object", "null"]}
            continue
        properties[name] = _value(entry)
        if entry.required:
            required.append(name)
    schema: JsonSchema = {"type": "object", "properties": properties, "additionalProperties": False}
    if block:
        schema["description"] = catalogue.blocks[block] or "A block of DeepSpeed that Sheer does not act on."
    return schema | ({"required": required} if required else {})


def _value(entry: Entry) -> JsonSchema:
    described: JsonSchema = {"description": _description(entry)}
    if entry.fate is Fate.ACTS and not entry.required:
        described["default"] = entry.default
    if entry.fate is Fate.REMOVED:
        described["deprecated"] = True
    kind = entry.kind.schema() if entry.fate in (Fate.ACTS, Fate.TUNES) else _off(entry)
    if entry.auto:
        kind = {"anyOf": [kind, {"const": "auto"}]}
    return described | kind


def _off(entry: Entry) -> JsonSchema:
    """Only the values that ask for nothing."""
    values = [off for off in entry.off if not isinstance(off, tuple)]
    off: JsonSchema = {"enum": [None, *values]}
    if not entry.gated:
        return off
    disabled = {"type": "object", "properties": {"enabled": {"const": False}}}
    return {"anyOf": [off, disabled]}


def _description(entry: Entry) -> str:
    if entry.fate is Fate.ACTS:
        difference = DIFFERENCES.get(entry.path)
        return f"{entry.about} DeepSpeed: {difference.theirs}." if difference else entry.about
    if entry.fate is Fate.TUNES:
        return f"Accepted without effect. {entry.about}"
    return f"Only off: {FOREIGN[entry.path].about.partition(': ')[0]} of DeepSpeed, which Sheer does not have."
