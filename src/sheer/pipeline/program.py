"""A model's forward as plain data: calls in order, and pieces of them that a stage runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from torch import nn

from sheer.errors import UsageError


class Op(Enum):
    """What a call does."""

    MODULE = "module"
    """Call the module of this name."""
    READ = "read"
    """Take the parameter or buffer of this name."""
    METHOD = "method"
    """Call the method of this name of the first argument."""
    FUNCTION = "function"
    """Call a function."""


@dataclass(frozen=True)
class Ref:
    """The value that the call of this name gave, or the input of this name."""

    name: str


class Call(NamedTuple):
    """One step of a forward. Arguments are constants, `Ref`s, and containers of both."""

    name: str
    op: Op
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def refs(self) -> set[str]:
        """Names of the values it takes."""
        return refs_in((self.args, self.kwargs))


class Piece(NamedTuple):
    """Calls that run together: from values by name to values by name."""

    takes: tuple[str, ...]
    calls: tuple[Call, ...]
    gives: tuple[str, ...]
    dead: tuple[tuple[str, ...], ...]
    """What nobody needs any more after each call."""

    @classmethod
    def of(cls, calls: Sequence[Call], *, takes: Sequence[str], gives: Sequence[str]) -> Piece:
        """The piece that makes these calls."""
        needed = set(gives)
        dead: list[tuple[str, ...]] = []
        for call in reversed(calls):
            used = call.refs() | {call.name}
            dead.append(tuple(sorted(used - needed)))
            needed |= used
        return cls(tuple(takes), tuple(calls), tuple(gives), tuple(reversed(dead)))

    def run(self, root: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run on `values`; each is let go after its last use."""
        known = {name: values[name] for name in self.takes}
        for call, dead in zip(self.calls, self.dead, strict=True):
            known[call.name] = run_call(root, call, known)
            for name in dead:
                del known[name]
        return {name: known[name] for name in self.gives}


def run_call(root: nn.Module, call: Call, known: Mapping[str, Any]) -> Any:
    """What `call` gives, with modules and parameters of `root`."""
    args = fill(call.args, known)
    kwargs = fill(call.kwargs, known)
    if call.op is Op.FUNCTION:
        return call.target(*args, **kwargs)
    if call.op is Op.METHOD:
        return getattr(args[0], call.target)(*args[1:], **kwargs)
    owner, _, attribute = call.target.rpartition(".")
    found = getattr(root.get_submodule(owner), attribute)
    return found(*args, **kwargs) if call.op is Op.MODULE else found


def refs_in(value: Any) -> set[str]:
    """Names of all `Ref`s in `value`."""
    if isinstance(value, Ref):
        return {value.name}
    if isinstance(value, (tuple, list)):
        return {name for item in value for name in refs_in(item)}
    if isinstance(value, Mapping):
        return {name for item in value.values() for name in refs_in(item)}
    if isinstance(value, slice):
        return refs_in((value.start, value.stop, value.step))
    return set()


def fill(value: Any, known: Mapping[str, Any]) -> Any:
    """`value` with what each `Ref` stands for in its place."""
    if isinstance(value, Ref):
        return known[value.name]
    if isinstance(value, tuple):
        return tuple(fill(item, known) for item in value)
    if isinstance(value, list):
        return [fill(item, known) for item in value]
    if isinstance(value, Mapping):
        return {key: fill(item, known) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(fill(value.start, known), fill(value.stop, known), fill(value.step, known))
    return value


def expect(value: Any, expected: Any, question: Callable[[Any], Any], where: str) -> None:
    """Refuse to go on where the forward would branch otherwise than it did when the model was cut."""
    found = question(value)
    if found != expected:
        raise UsageError(
            f"{where}: this was {expected!r} for the sample_input that the model was cut with, and the pipeline follows"
            f" that branch; now it is {found!r}. Cut it with a sample that is like the batches, or move the decision"
            " into a block"
        )
