"""Which parameters are gathered together, and where calls must be watched for it. Pure: no tensors are looked at.

A *unit* is a block, or the rest of the model (named ""). A parameter belongs to the innermost block that encloses every
place where it is registered; one that several blocks share belongs to what encloses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from sheer.layout import Split

ROOT = ""
WHOLE = Split()
LARGE = 100_000
"""Elements of a layer that is worth a gather of its own; the default of DeepSpeed's
`stage3_param_persistence_threshold`."""


class Units(NamedTuple):
    """The units of a model."""

    unit_of: Mapping[str, str]
    """Parameter -> unit. A tied parameter is here under each of its names."""
    order: tuple[str, ...]
    """Every unit that has parameters, as their modules are defined; an outer block before those inside it."""
    gates: Mapping[str, tuple[str, ...]]
    """Module -> the units that a call of it needs."""
    blocks: tuple[str, ...] = ()
    """The modules that `find_units` was given."""
    outside: frozenset[str] = frozenset()
    """Parameters of blocks that belong to no unit but the model's, since they are read outside their block."""
    chunks: tuple[tuple[str, ...], ...] = ()
    """The units, but for "", that each chunk of a pipeline's stage needs; a plain model is one chunk."""


NO_UNITS = Units({}, (), {})


def large_layers(module: nn.Module, *, beside: Sequence[str]) -> tuple[str, ...]:
    """The layers of plain `Sequential`s, in none of the blocks `beside`, that have at least `LARGE` elements. Gathered
    with what is in no block they would stay for the whole step.

    No others, such as embeddings and heads: a `Sequential` calls its layers one by one, in order, on all ranks alike,
    and nobody else reads their weights; of a layer that a model's own forward calls nobody knows that.
    """
    around = tuple(f"{block}." for block in beside if block)
    return tuple(
        f"{fqn}.{name}" if fqn else name
        for fqn, parent in module.named_modules()
        if isinstance(parent, nn.Sequential) and type(parent).forward is nn.Sequential.forward
        for name, layer in parent.named_children()
        if not f"{fqn}.".startswith(around) and _is_large_layer(layer)
    )


def _is_large_layer(layer: nn.Module) -> bool:
    return next(layer.children(), None) is None and sum(param.numel() for param in layer.parameters()) >= LARGE


def find_units(
    module: nn.Module, blocks: Sequence[str], *, outside: frozenset[str] = frozenset(), split: Split = WHOLE
) -> Units:
    """Make every module named in `blocks` a unit, one inside another too, but for the parameters named in `outside`,
    and for those that several stages of `split` hold: all of them must lay them out alike.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    first_name = {id(found): fqn for fqn, found in module.named_modules()}
    names = {id(modules[fqn]): first_name[id(modules[fqn])] for fqn in blocks} | {id(module): ROOT}

    def enclosing(path: str) -> list[str]:
        """The units around a module, itself included, outermost first."""
        parts = path.split(".") if path else []
        around = ["", *(".".join(parts[: depth + 1]) for depth in range(len(parts)))]
        return [names[id(modules[fqn])] for fqn in around if id(modules[fqn]) in names]

    places: dict[int, list[str]] = {}
    for path, owner in modules.items():
        for param in owner._parameters.values():
            if param is not None:
                places.setdefault(id(param), []).append(path)
    for fqn in outside:
        places[id(module.get_parameter(fqn))].append(ROOT)
    homes = {param: _innermost_common([enclosing(path) for path in paths]) for param, paths in places.items()}
    homes |= {
        id(param): ROOT
        for fqn, param in module.named_parameters(remove_duplicate=False)
        if split.canonical.get(fqn, fqn) in split.tied
    }

    unit_of: dict[str, str] = {}
    needs: dict[str, list[str]] = {ROOT: []}
    for path, owner in modules.items():
        for name, param in owner._parameters.items():
            if param is None:
                continue
            unit = unit_of[f"{path}.{name}" if path else name] = homes[id(param)]
            gate = enclosing(path)[-1] or first_name[id(owner)]
            if unit not in needs.setdefault(gate, []):
                needs[gate].append(unit)
    used = set(unit_of.values())
    if ROOT in used and ROOT not in needs[ROOT]:
        needs[ROOT].append(ROOT)
    order = tuple(fqn for fqn in first_name.values() if fqn in used)
    gates = {gate: tuple(sorted(units, key=order.index)) for gate, units in needs.items()}
    return Units(unit_of, order, gates, tuple(blocks), outside, _by_chunk(unit_of, order, split))


def _by_chunk(unit_of: Mapping[str, str], order: Sequence[str], split: Split) -> tuple[tuple[str, ...], ...]:
    """The units of each chunk; those that no one chunk has are every chunk's."""
    users: dict[str, set[int | None]] = {}
    for fqn, unit in unit_of.items():
        users.setdefault(unit, set()).add(split.chunk_of.get(fqn))
    return tuple(
        tuple(unit for unit in order if unit != ROOT and not users[unit].isdisjoint({chunk, None}))
        for chunk in range(split.chunks)
    )


def _innermost_common(chains: list[list[str]]) -> str:
    """The last of the first chain that all others have too; all begin with the model itself."""
    return next(unit for unit in reversed(chains[0]) if all(unit in chain for chain in chains))
