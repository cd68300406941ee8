"""From a path, JSON file or mapping to the plain dict that the user gave."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sheer.config.kinds import describe, show
from sheer.errors import ConfigError


class Source(NamedTuple):
    """What was given, and how errors name it."""

    name: str
    content: dict[str, Any]


def read_source(source: object) -> Source:
    """Read a config given as a path to a JSON file or as a mapping.

    Raises:
        ConfigError: the file is missing, unreadable, not JSON, not an object, or says a key twice.
    """
    if isinstance(source, Mapping):
        return Source("config", _copied(source))
    if isinstance(source, str | os.PathLike):
        return _read_file(Path(source))
    raise ConfigError(
        f"config: must be a path to a JSON file, a dict or a sheer.config.Config, not {describe(source)}."
    )


def _read_file(path: Path) -> Source:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        mend = " (To give the JSON itself, pass json.loads(text).)" if str(path).lstrip().startswith("{") else ""
        raise ConfigError(f"config: no file at {show(str(path), width=500)}; looked in {Path.cwd()}.{mend}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config: cannot read {show(str(path), width=500)}: {error}.") from None
    return Source(str(path), parse(text, name=str(path)))


def parse(text: str, *, name: str) -> dict[str, Any]:
    """The object in the JSON `text`; `name` is what errors call it.

    Raises:
        ConfigError: with line and column where it is not JSON, or with every key that is said twice.
    """
    repeated: list[tuple[dict[str, Any], str]] = []

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                repeated.append((result, key))
            result[key] = value
        return result

    try:
        content = json.loads(text, object_pairs_hook=to_dict)
    except json.JSONDecodeError as error:
        line = (text.splitlines() or [""])[min(error.lineno, len(text.splitlines()) or 1) - 1].strip()
        raise ConfigError(
            f"{name}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}, at {show(line)}. "
            "JSON has no comments, no trailing commas, and double quotes only."
        ) from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply to be a config.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: must hold one JSON object {{...}}, not {show(content)}.")
    twice = [_path_to(holder, inside=content, key=key) for holder, key in repeated]
    if twice:
        raise ConfigError(f"{name}: said more than once: {', '.join(dict.fromkeys(twice))}. Keep one of each.")
    return content


def _path_to(holder: dict[str, Any], *, inside: Any, key: str) -> str:
    """The dotted path of `key` in `holder`, an object somewhere inside `inside`; the bare key where it was replaced."""
    waiting: list[tuple[Any, str]] = [(inside, "")]
    while waiting:
        value, prefix = waiting.pop()
        if value is holder:
            return prefix + key
        if isinstance(value, dict):
            waiting.extend((child, f"{prefix}{name}.") for name, child in value.items())
        elif isinstance(value, list):
            waiting.extend((child, f"{prefix}{index}.") for index, child in enumerate(value))
    return key


def _copied(value: Any) -> Any:
    """A copy of the containers in `value`, mappings as dicts; the leaves are shared."""
    if isinstance(value, Mapping):
        return {key: _copied(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_copied(child) for child in value]
    return value
