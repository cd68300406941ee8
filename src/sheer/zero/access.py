"""Whole parameters while they are sharded, for code that looks at them or changes them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple, final

import torch

from sheer.errors import UsageError
from sheer.zero.building import building_here
from sheer.zero.placing import Home, Placed
from sheer.zero.runtime import placed_of
from sheer.zero.units import ROOT


class _Place(NamedTuple):
    param: torch.nn.Parameter
    placed: Placed
    home: Home


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """At stage 3, gather `parameter` with what is in no block from the next step on, whoever reads it. All ranks make
    this call, after `initialize`.

    Needed only where another *block* reads it in its own call (an error says so): what the rest of the model reads
    outside the parameter's block is found by itself. So nothing is done for a parameter that no engine has yet, or
    that is not sharded. `module` is DeepSpeed's argument, the one that reads it.
    """
    _check_external(module, parameter)
    placed = placed_of(parameter)
    home = None if placed is None else placed.home(parameter)
    if placed is not None and home is not None and home.flat.plan.key.unit != ROOT:
        placed.gathering.read_outside.add(home.flat.plan.slots[home.position].fqn)


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """DeepSpeed's: a parameter stays where it is gathered until the next engine is built."""
    _check_external(module, parameter)


def _check_external(module: object, parameter: object) -> None:
    if not isinstance(module, torch.nn.Module) or not isinstance(parameter, torch.nn.Parameter):
        raise UsageError(
            f"external parameters are given as (module, parameter), not as ({type(module).__name__}, "
            f"{type(parameter).__name__})"
        )


@final
class GatheredParameters:
    """`with sheer.zero.GatheredParameters(params):` parameters have their values inside. Collective: all ranks enter
    and leave together. At stages 0 to 2, and for parameters that no engine holds, they have them anyway.

    Whole units are gathered (see `zero_optimization.blocks`), so memory for the blocks of `params` is needed.

    Args:
        params: a parameter, several of them, or a module (all of its parameters).
        modifier_rank: what this rank has written in place when the block ends is what every rank gets. None: what is
            written in place counts too, but is not sent, so every rank must write the same.
        fwd_module: DeepSpeed's; not needed.
        enabled: False does nothing.
    """

    def __init__(
        self,
        params: torch.nn.Parameter | Iterable[torch.nn.Parameter] | torch.nn.Module,
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, torch.nn.Module):
            params = params.parameters()
        elif isinstance(params, torch.nn.Parameter):
            params = [params]
        self._params = list(params) if enabled else []
        self._modifier = modifier_rank
        self._stack = ExitStack()
        self._places: list[_Place] = []

    def __enter__(self) -> None:
        building = building_here()
        if building is not None:
            building.settle()
        with torch._C.DisableTorchFunction():  # our own work is nothing that `Init` or a forward should look at
            self._gather()

    def _gather(self) -> None:
        self._places = _find(self._params)
        units: dict[int, tuple[Placed, list[str]]] = {}
        for _, placed, home in self._places:
            if self._modifier is not None and not 0 <= self._modifier < placed.axis.size:
                raise UsageError(
                    f"GatheredParameters: modifier_rank={self._modifier} is none of {placed.axis.size} ranks"
                )
            units.setdefault(id(placed), (placed, []))[1].append(home.flat.plan.key.unit)
        for placed, names in units.values():
            self._stack.enter_context(placed.gathering.pinned(names))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with torch._C.DisableTorchFunction(), self._stack:
            if error is not None:
                return
            if self._modifier is None:
                for flat in {home.flat for _, _, home in self._places}:
                    flat.notice_writes(traceless=True)
                return
            for param, placed, home in self._places:
                value = param.detach().contiguous()
                placed.axis.broadcast(value, source=self._modifier)
                home.flat.write(home.position, value)


def _find(params: list[torch.nn.Parameter]) -> list[_Place]:
    """Where the parameters are that an engine holds. A frozen one that is not sharded leads to no engine by itself,
    but is found where the others lead."""
    everywhere = {id(placed): placed for param in params if (placed := placed_of(param)) is not None}
    places = []
    for param in dict.fromkeys(params):
        for placed in everywhere.values():
            if (home := placed.home(param)) is not None:
                places.append(_Place(param, placed, home))
    return places
