"""The kinds of value a key may hold: what is allowed in words, the check, and the JSON schema.

One vocabulary serves the fields that Sheer acts on (as pydantic metadata) and the DeepSpeed keys it only accepts, so
every refusal reads the same. No kind coerces: a string is never a number, and a bool is never an integer.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema
from typing_extensions import override

JsonSchema = dict[str, Any]


class KindError(ValueError):
    """A value is not of its key's kind; the text says what is allowed, what was given and how to mend it."""


def show(value: object, *, width: int = 70) -> str:
    """`value` as a JSON user would write it, cut to `width` characters."""
    text = json.dumps(value, default=lambda leaf: f"<{type(leaf).__name__}>", ensure_ascii=False, skipkeys=True)
    return text if len(text) <= width else text[: width - 3] + "..."


def describe(value: object) -> str:
    """`value` with the name of its type in JSON, for an error: `the string "8"`."""
    match value:
        case bool() | None:
            return show(value)
        case str():
            return f"the string {show(value)}"
        case int() | float():
            return f"the number {show(value)}"
        case Mapping():
            return f"the object {show(value)}"
        case list() | tuple():
            return f"the list {show(value)}"
        case _:
            return f"a Python {type(value).__name__}"


@dataclass(frozen=True)
class Kind(ABC):
    """A kind of value. Concrete kinds are final; each is also pydantic metadata: `Annotated[bool, Flag()]`."""

    @property
    @abstractmethod
    def allowed(self) -> str:
        """What may be given, in words that follow "must be"."""

    @abstractmethod
    def accepts(self, value: Any) -> bool:
        """Whether `value` is of this kind."""

    @abstractmethod
    def schema(self) -> JsonSchema:
        """The JSON schema of this kind, without any promise about what JSON cannot hold."""

    def normal(self, value: Any) -> Any:
        """The one spelling of an accepted `value` that the rooms see."""
        return value

    def why_not(self, value: Any) -> str:
        """Why `value` is refused, and how to mend it where that can be guessed."""
        mends = [candidate for candidate in _other_spellings(value) if self.accepts(candidate)]
        mend = f" Write {show(mends[0])}." if mends else ""
        return f"must be {self.allowed}, not {describe(value)}.{mend}"

    def check(self, value: Any) -> Any:
        """The normal spelling of `value`; raises `KindError` when it is not of this kind."""
        if not self.accepts(value):
            raise KindError(self.why_not(value))
        return self.normal(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let pydantic validate a field of this kind by `check`."""
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        """Let pydantic describe a field of this kind by `schema`."""
        return self.schema()


@final
@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    @property
    @override
    def allowed(self) -> str:
        return "true or false"

    @override
    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)

    @override
    def schema(self) -> JsonSchema:
        return {"type": "boolean"}


@final
@dataclass(frozen=True)
class Whole(Kind):
    """An integer in a range. With `exponent`, also a float without a fraction, as in DeepSpeed's `5e8`."""

    minimum: int | None = None
    maximum: int | None = None
    exponent: bool = False

    @property
    @override
    def allowed(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f"an integer from {self.minimum} to {self.maximum}"
        return "an integer" if self.minimum is None else f"an integer of at least {self.minimum}"

    @override
    def accepts(self, value: Any) -> bool:
        whole = isinstance(value, int) or (self.exponent and isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            return False
        return (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)

    @override
    def normal(self, value: Any) -> int:
        return int(value)

    @override
    def schema(self) -> JsonSchema:
        bounds = {"minimum": self.minimum, "maximum": self.maximum}
        return {"type": "integer"} | {name: bound for name, bound in bounds.items() if bound is not None}


@final
@dataclass(frozen=True)
class Real(Kind):
    """A finite number, integers included; `minimum` is allowed itself, `above` is not."""

    minimum: float | None = None
    above: float | None = None

    @property
    @override
    def allowed(self) -> str:
        if self.above is not None:
            return f"a finite number above {self.above:g}"
        return "a finite number" if self.minimum is None else f"a finite number of at least {self.minimum:g}"

    @override
    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return (self.minimum is None or value >= self.minimum) and (self.above is None or value > self.above)

    @override
    def normal(self, value: Any) -> float:
        return float(value)

    @override
    def schema(self) -> JsonSchema:
        bounds = {"minimum": self.minimum, "exclusiveMinimum": self.above}
        return {"type": "number"} | {name: bound for name, bound in bounds.items() if bound is not None}


@final
@dataclass(frozen=True)
class Text(Kind):
    """A string; `filled` asks for at least one character."""

    filled: bool = False

    @property
    @override
    def allowed(self) -> str:
        return "a non-empty string" if self.filled else "a string"

    @override
    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and bool(value or not self.filled)

    @override
    def schema(self) -> JsonSchema:
        return {"type": "string", "minLength": 1} if self.filled else {"type": "string"}


@final
@dataclass(frozen=True)
class Choice(Kind):
    """One of a few values. `aliases` are other spellings of them."""

    options: tuple[str | int, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    @override
    def allowed(self) -> str:
        names = [show(option) for option in self.options]
        return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]

    @override
    def accepts(self, value: Any) -> bool:
        same = (type(value) is type(option) and value == option for option in self.options)
        return any(same) or (isinstance(value, str) and value in self.aliases)

    @override
    def normal(self, value: Any) -> Any:
        return self.aliases.get(value, value)

    @override
    def schema(self) -> JsonSchema:
        return {"enum": [*self.options, *self.aliases]}


@final
@dataclass(frozen=True)
class Names(Kind):
    """A list of non-empty strings, or one of a few `keywords` instead of it."""

    keywords: tuple[str, ...] = ()

    @property
    @override
    def allowed(self) -> str:
        return ", ".join(show(word) for word in self.keywords) + (" or " if self.keywords else "") + "a list of names"

    @override
    def accepts(self, value: Any) -> bool:
        if isinstance(value, str):
            return value in self.keywords
        return isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)

    @override
    def normal(self, value: Any) -> str | tuple[str, ...]:
        return value if isinstance(value, str) else tuple(value)

    @override
    def schema(self) -> JsonSchema:
        names = {"type": "array", "items": {"type": "string", "minLength": 1}}
        return {"anyOf": [{"enum": list(self.keywords)}, names]} if self.keywords else names


@final
@dataclass(frozen=True)
class Object(Kind):
    """A free-form object, handed on as it is."""

    @property
    @override
    def allowed(self) -> str:
        return "an object"

    @override
    def accepts(self, value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)

    @override
    def schema(self) -> JsonSchema:
        return {"type": "object"}


@final
@dataclass(frozen=True)
class Anything(Kind):
    """Any JSON value: for what DeepSpeed itself leaves open."""

    @property
    @override
    def allowed(self) -> str:
        return "any value"

    @override
    def accepts(self, value: Any) -> bool:
        return True

    @override
    def schema(self) -> JsonSchema:
        return {}


@final
@dataclass(frozen=True)
class Backend(Kind):
    """A compiler backend: its name, or from Python the function itself."""

    @property
    @override
    def allowed(self) -> str:
        return "the name of a torch.compile backend, an import path `pkg.mod.fn`, or from Python a callable"

    @override
    def accepts(self, value: Any) -> bool:
        return (isinstance(value, str) and bool(value)) or isinstance(value, Callable)  # type: ignore[arg-type]

    @override
    def schema(self) -> JsonSchema:
        return {"type": "string", "minLength": 1}


@final
@dataclass(frozen=True)
class Interval(Kind):
    """Every how many steps; null, and the float infinity that accelerate sends, mean never."""

    @property
    @override
    def allowed(self) -> str:
        return "an integer of at least 1, or null (off)"

    @override
    def accepts(self, value: Any) -> bool:
        return value is None or Whole(minimum=1).accepts(value) or (isinstance(value, float) and value == math.inf)

    @override
    def normal(self, value: Any) -> int | None:
        return value if isinstance(value, int) else None

    @override
    def schema(self) -> JsonSchema:
        # The last alternative is infinity, which a schema cannot name otherwise.
        infinite = {"type": "number", "exclusiveMinimum": 1.7e308}
        return {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}, infinite]}


@final
@dataclass(frozen=True)
class Maybe(Kind):
    """Another kind, or null for "not given"."""

    kind: Kind

    @property
    @override
    def allowed(self) -> str:
        return f"{self.kind.allowed}, or null"

    @override
    def accepts(self, value: Any) -> bool:
        return value is None or self.kind.accepts(value)

    @override
    def normal(self, value: Any) -> Any:
        return None if value is None else self.kind.normal(value)

    @override
    def schema(self) -> JsonSchema:
        return {"anyOf": [self.kind.schema(), {"type": "null"}]}


def _other_spellings(value: object) -> list[object]:
    """What the writer of a refused `value` may have meant: `"8"` as 8, `8.0` as 8, 1 as true."""
    if isinstance(value, str):
        try:
            return [json.loads(value.strip().lower())]
        except ValueError:
            return [value.strip().lower()]
    if isinstance(value, float) and value.is_integer():
        return [int(value)]
    if type(value) is int and value in (0, 1):
        return [bool(value)]
    return []
