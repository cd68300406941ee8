"""A list of layers as a pipeline's source: built only where they run, and alike whatever the split."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from sheer import comm
from sheer import device as devices
from sheer.errors import UsageError, did_you_mean
from sheer.pipeline.specs import LayerSpec, TiedLayerSpec
from sheer.pipeline.timing import Stopwatch
from sheer.pipeline.units import Function, Held, Layer, Tied, Unit

Given = nn.Module | LayerSpec | Callable[[Any], Any]
Seeding = Callable[[int], Any]
"""Seeds all generators for the layer of this index."""


class Layers:
    """Modules, specs and functions in order, under the names that `nn.Sequential` would give them.

    Raises:
        UsageError: something in the list is none of these, or tied parameters do not fit each other.
    """

    def __init__(self, given: Iterable[Given], *, seeding: Seeding) -> None:
        if isinstance(given, nn.Sequential):
            named: list[tuple[str, Any]] = list(given._modules.items())
        else:
            named = [(str(index), layer) for index, layer in enumerate(given)]
        self.names = [name for name, _ in named]
        self.given = [layer for _, layer in named]
        self._seeding = seeding
        for name, layer in named:
            if not (isinstance(layer, (nn.Module, LayerSpec)) or callable(layer)):
                raise UsageError(f"layer {name} is {layer!r}; a layer is a torch.nn.Module, a LayerSpec or a function")

    @cached_property
    def kinds(self) -> Sequence[str]:
        """Class names, and the names of functions."""
        return [_kind(layer) for layer in self.given]

    def numels(self) -> Sequence[int]:
        """Number of parameters of each layer."""
        return [_numel(self._sketch(index)) for index in range(len(self.given))]

    def ties(self) -> Mapping[str, Sequence[Held]]:
        """Parameters of layers of one `TiedLayerSpec` key, and those that several given modules share."""
        return {held[0].name: held for held in [*self._tied_by_key, *self._tied_by_identity()]}

    def populate(self, root: nn.Module, units: Sequence[int]) -> Mapping[int, Unit]:
        """Build or take these layers, tie them, and give the way to call each."""
        for index in units:
            self._put(root, index)
        self._tie(root, {*units})
        return {index: self._unit(index) for index in units}

    def seconds(self, sample: Any) -> Sequence[float]:
        """Time of each layer, built one after the other; tied parameters are not tied while it is measured."""
        watch = Stopwatch(sample)
        for index in range(len(self.given)):
            root = nn.Module()
            self._put(root, index)
            watch.run(self._unit(index), root)
        return watch.seconds

    # ---- one layer

    def _put(self, root: nn.Module, index: int) -> None:
        layer = self.given[index]
        if isinstance(layer, LayerSpec):
            root.add_module(self.names[index], self._build(index))
        elif isinstance(layer, nn.Module):
            root.add_module(self.names[index], layer)

    def _unit(self, index: int) -> Unit:
        layer, name, kind = self.given[index], self.names[index], self.kinds[index]
        if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
            return Tied(name, kind, layer.forward_fn)
        if isinstance(layer, (nn.Module, LayerSpec)):
            return Layer(name, kind)
        return Function(layer, kind)

    def _build(self, index: int) -> nn.Module:
        """The layer of a spec, with the weights that this index always has."""
        layer = self.given[index]
        assert isinstance(layer, LayerSpec)
        with _generators_kept():
            self._seeding(index)
            return layer.build()

    def _sketch(self, index: int) -> nn.Module | None:
        """The layer without memory for its weights, where its class allows; None for a function."""
        layer = self.given[index]
        if isinstance(layer, nn.Module):
            return layer
        if not isinstance(layer, LayerSpec):
            return None
        with _generators_kept():
            try:
                with torch.device("meta"):
                    return layer.build()
            except Exception:  # it computes with its weights as it is built: then it has to have some
                return layer.build()

    # ---- ties

    @cached_property
    def _tied_by_key(self) -> list[list[Held]]:
        """The places of each parameter that specs of one key share, checked against each other by their shapes."""
        by_key: dict[str, list[int]] = {}
        for index, layer in enumerate(self.given):
            if isinstance(layer, TiedLayerSpec):
                by_key.setdefault(layer.key, []).append(index)
        return [held for key, indices in by_key.items() if len(indices) > 1 for held in self._places(key, indices)]

    def _places(self, key: str, indices: Sequence[int]) -> list[list[Held]]:
        attributes = [self.given[index].tied_weight_attr for index in indices]
        if len({len(names) for names in attributes}) > 1:
            told = ", ".join(f"layer {i}: {names}" for i, names in zip(indices, attributes, strict=True))
            raise UsageError(f"the layers tied by {key!r} must name equally many parameters; {told}")
        sketches = {index: dict(_sketched(self._sketch(index))) for index in indices}
        places = []
        for names in zip(*attributes, strict=True):
            found = [_find(sketches[i], name, layer=i, key=key) for i, name in zip(indices, names, strict=True)]
            for index, name, parameter in zip(indices, names, found, strict=True):
                if parameter.shape != found[0].shape or parameter.dtype != found[0].dtype:
                    raise UsageError(
                        f"tied by {key!r}: layer {index}'s {name} is {_shape(parameter)}, but layer {indices[0]}'s"
                        f" {names[0]} is {_shape(found[0])}; tied parameters must have one shape and dtype"
                    )
            places.append([Held(i, f"{self.names[i]}.{name}") for i, name in zip(indices, names, strict=True)])
        return places

    def _tied_by_identity(self) -> list[list[Held]]:
        """The places of each parameter that several of the given modules share."""
        places: dict[int, list[Held]] = {}
        for index, layer in enumerate(self.given):
            if isinstance(layer, nn.Module):
                for name, parameter in layer.named_parameters(prefix=self.names[index], remove_duplicate=False):
                    places.setdefault(id(parameter), []).append(Held(index, name))
        return [held for held in places.values() if len({one.unit for one in held}) > 1]

    def _tie(self, root: nn.Module, mine: set[int]) -> None:
        """Make each tied parameter one object here, with the value that the first layer of its key draws."""
        elsewhere: dict[int, nn.Module] = {}
        for first, *others in self._tied_by_key:
            local = [held for held in others if held.unit in mine]
            if not local:
                continue
            name = first.name
            if first.unit in mine:
                shared = root.get_parameter(name)
            else:
                if first.unit not in elsewhere:
                    elsewhere[first.unit] = self._build(first.unit)
                shared = elsewhere[first.unit].get_parameter(name.removeprefix(f"{self.names[first.unit]}."))
            for held in local:
                owner, _, attribute = held.name.rpartition(".")
                setattr(root.get_submodule(owner), attribute, shared)


def _kind(layer: Any) -> str:
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def _numel(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def _sketched(module: nn.Module | None) -> Iterable[tuple[str, nn.Parameter]]:
    return () if module is None else module.named_parameters(remove_duplicate=False)


def _find(known: Mapping[str, nn.Parameter], name: str, *, layer: int, key: str) -> nn.Parameter:
    if name in known:
        return known[name]
    raise UsageError(
        f"tied by {key!r}: layer {layer} has no parameter {name!r}; it has {', '.join(known) or 'none'}."
        f"{did_you_mean(name, known)} Say which one is shared with tied_weight_attr."
    )


def _shape(parameter: nn.Parameter) -> str:
    return f"{list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave torch's generators as they were."""
    device = devices.pick(devices.local_rank(rank=comm.rank()))
    states = devices.rng_states(device)
    try:
        yield
    finally:
        devices.set_rng_states(device, states)


def from_global_seed() -> Seeding:
    """Every layer has a seed of its own, drawn from one number that is taken from torch's generator here.

    So weights follow `torch.manual_seed`, and depend on a layer's index but not on which rank builds it.
    """
    base = int(torch.randint(2**62, ()))

    def seed(index: int) -> None:
        digest = hashlib.sha256(f"{base}/{index}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    return seed


def from_base_seed(base: int, seed_fn: Callable[[int], Any] | None) -> Seeding:
    """Layer i is built after `seed_fn(base + i)`, by default `torch.manual_seed`."""
    use = torch.manual_seed if seed_fn is None else seed_fn
    return lambda index: use(base + index)
