"""The few exception types of Sheer, and the one way it suggests a name.

A message names the key or tensor, the value that was given, what is allowed, and how to mend it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SheerError(Exception):
    """Base of every error that Sheer raises on purpose."""


class ConfigError(SheerError, ValueError):
    """The configuration asks for something unknown, contradictory or unavailable."""


class UsageError(SheerError, RuntimeError):
    """A call came at the wrong moment or with arguments that cannot work."""


class DataError(SheerError, ValueError):
    """The data set, the loader or a batch is not what the engine was told to expect."""


class CheckpointError(SheerError, RuntimeError):
    """A checkpoint cannot be written or read; what was there before is unchanged."""


class TornLoadError(CheckpointError):
    """A load failed after its point of no return: values are old and new side by side until another load succeeds."""


class CommError(SheerError, RuntimeError):
    """Ranks failed, disagree, or are missing."""


class CompileError(SheerError, RuntimeError):
    """A compile target or backend cannot work on this machine."""


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The up to `count` known names most like `name`, best first; empty when nothing is near."""
    by_folded = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), list(by_folded), n=count, cutoff=0.6)
    return [by_folded[folded] for folded in found]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence to append to an error: ` Did you mean 'x' or 'y'?`, or the empty string."""
    names = nearest(name, known)
    return f" Did you mean {' or '.join(repr(n) for n in names)}?" if names else ""
