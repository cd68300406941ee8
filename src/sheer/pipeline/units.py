"""What a pipeline is cut into, and the one interface of everything it can be made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn


class Unit(Protocol):
    """One piece of the model that stays whole: takes what the piece before it gave, gives what the next one takes."""

    @property
    def kind(self) -> str:
        """The class it is known by, for `checkpointable_layers`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names, under the stage's module, of what it calls or reads there."""

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the modules that it calls."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of what it reads otherwise."""

    def __call__(self, root: nn.Module, carry: Any) -> Any:
        """Run on what the unit before it returned; modules and parameters are looked up in `root` by name."""


class Layer(NamedTuple):
    """A module, called with the carry as its one argument."""

    name: str
    kind: str

    @property
    def names(self) -> tuple[str, ...]:
        """Its own."""
        return (self.name,)

    @property
    def calls(self) -> tuple[str, ...]:
        """Its own."""
        return (self.name,)

    @property
    def reads(self) -> tuple[str, ...]:
        """None."""
        return ()

    def __call__(self, root: nn.Module, carry: Any) -> Any:
        """`module(carry)`."""
        module = root._modules[self.name]
        assert module is not None
        return module(carry)


class Tied(NamedTuple):
    """A module with a function to call in its place."""

    name: str
    kind: str
    forward: Callable[[Any, Any], Any]

    @property
    def names(self) -> tuple[str, ...]:
        """Its own."""
        return (self.name,)

    @property
    def calls(self) -> tuple[str, ...]:
        """None: the function decides."""
        return ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Its own."""
        return (self.name,)

    def __call__(self, root: nn.Module, carry: Any) -> Any:
        """`forward_fn(module, carry)`."""
        return self.forward(root._modules[self.name], carry)


class Function(NamedTuple):
    """A plain function; it holds nothing."""

    function: Callable[[Any], Any]
    kind: str

    @property
    def names(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def calls(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def reads(self) -> tuple[str, ...]:
        """None."""
        return ()

    def __call__(self, root: nn.Module, carry: Any) -> Any:
        """`function(carry)`."""
        return self.function(carry)


class Held(NamedTuple):
    """A parameter as one unit knows it."""

    unit: int
    name: str


class Source(Protocol):
    """The whole of what is to be cut, known on every rank alike, before anything is kept."""

    @property
    def kinds(self) -> Sequence[str]:
        """The class name of each unit."""

    def numels(self) -> Sequence[int]:
        """Number of parameters of each unit."""

    def seconds(self, sample: Any) -> Sequence[float]:
        """Measured time of each unit, forward and backward, on `sample`."""

    def ties(self) -> Mapping[str, Sequence[Held]]:
        """Parameters that several units hold, by their canonical name, in order of units."""

    def populate(self, root: nn.Module, units: Sequence[int]) -> Mapping[int, Unit]:
        """Put what these units hold into `root` under its own names."""
