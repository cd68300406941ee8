"""A model that was built on the meta device gets its values, one module at a time, and is sharded meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from sheer.errors import UsageError
from sheer.zero.building import Building, site_of
from sheer.zero.flat import blank_value, is_blank


def materialize(model: torch.nn.Module, init_fn: Callable[[torch.nn.Module], None] | None = None) -> None:
    """Give every parameter and buffer of `model` that is on the meta device memory and values, as `zero.Init` does with
    a constructor: on no rank is more whole than the parameters of one module. Collective.

    Every module that has such tensors of its own runs its `reset_parameters()`, if it has one, then `init_fn(module)`,
    if given; the modules inside it come first, in the order of their definition. So values are those of a plain
    construction with the same seed where all modules initialise themselves that way, in that order. Ties stay, and so
    do the Parameter objects.

    Raises:
        UsageError: a tensor is in a module that cannot initialise itself, or that did not give it a value.
    """
    owners = [module for module in _inner_first(model) if any(True for _ in _meta_of(module))]
    if init_fn is None:
        names = {id(module): fqn for fqn, module in model.named_modules()}
        for module in owners:
            if not callable(getattr(module, "reset_parameters", None)):
                raise UsageError(
                    f"module {names[id(module)]!r} ({type(module).__name__}) has {next(_meta_of(module))[0]!r} on the "
                    "meta device and no reset_parameters(); give materialize an init_fn that sets it"
                )
    site = site_of()
    building = Building(site)
    with building, torch.no_grad():
        for module in owners:
            fresh = _fill(module, site.device)
            if site.axis.size > 1:
                building.watch_own(module)
            _initialize(module, init_fn, fresh)
    building.settle()


def _inner_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
    yield module


def _meta_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and tensor.is_meta:
            yield name, tensor


def _fill(module: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Give memory, filled so that it shows whether it has been written. The tensors that got it."""
    fresh = dict(_meta_of(module))
    for tensor in fresh.values():
        data = torch.full(tensor.shape, blank_value(tensor.dtype), dtype=tensor.dtype, device=device)
        filled = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, filled)  # type: ignore[no-untyped-call]  # the object stays, wherever it is tied
    return fresh


def _initialize(
    module: torch.nn.Module, init_fn: Callable[[torch.nn.Module], None] | None, fresh: dict[str, torch.Tensor]
) -> None:
    versions = {name: tensor._version for name, tensor in fresh.items()}
    _reset(
        module, keep=[param for name, param in module._parameters.items() if param is not None and name not in fresh]
    )
    if init_fn is not None:
        init_fn(module)
    for name in fresh:
        tensor = getattr(module, name)  # a buffer may be another tensor by now
        if tensor is fresh[name] and _is_unset(tensor, versions[name]):
            raise UsageError(
                f"{type(module).__name__}.{name} of shape {tuple(tensor.shape)} was on the meta device and got no "
                "value: neither the module's reset_parameters() nor init_fn sets it"
            )


def _reset(module: torch.nn.Module, *, keep: list[torch.nn.Parameter]) -> None:
    """Its `reset_parameters()`, if it has one; `keep` are tied to a module that came earlier, and keep their values, as
    where a constructor draws some and then the tied parameter takes their place."""
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        return
    before = [param.detach().clone() for param in keep]
    reset()
    for param, value in zip(keep, before, strict=True):
        param.copy_(value)


def _is_unset(tensor: torch.Tensor, version: int) -> bool:
    if tensor.dtype is torch.bool:  # both of its values may be meant
        return tensor._version == version
    return tensor.numel() > 0 and (bool(tensor.isnan().any()) or is_blank(tensor))
