"""From a module and a config to a layout, a runtime and a flat optimizer; and from one such plan to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from sheer import layout as layouts
from sheer import restate
from sheer.comm import Axis, Depot, Depots, DeviceMemory, Files, HostMemory, Mesh
from sheer.compiler import compiled_by_user, find_blocks, pick
from sheer.config import Config
from sheer.config.sections import OffloadOptimizer, OffloadParam
from sheer.errors import ConfigError, UsageError
from sheer.layout import LOW_PRECISION, Layout, ParamSpec, Place, Placement, Split
from sheer.optim.flat import (
    MASTER,
    FlatOptimizer,
    cannot_shard,
    expected_state,
    needs_whole_tensors,
)
from sheer.optim.forms import StateForm, as_tensor, form_of
from sheer.optim.pieces import Master, SavedState, StatePiece
from sheer.statistics import Census, take
from sheer.zero import NO_UNITS, ROOT, Source, Units, Wiring, ZeroRuntime, find_units, large_layers

WHOLE = Split()
PLACES = {"none": Place.DEVICE, "cpu": Place.HOST, "nvme": Place.FILES}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Plan(NamedTuple):
    """A layout and what runs it."""

    layout: Layout
    runtime: ZeroRuntime
    optimizer: FlatOptimizer | None
    census: Census


def fp32_islands(module: torch.nn.Module) -> frozenset[str]:
    """Parameters that keep their dtype in a low-precision model: those of normalisations with running statistics.

    Buffers keep their dtype, and torch's batch norm refuses weights of another dtype than its statistics. It takes
    low-precision inputs all the same.
    """
    kept = torch.nn.modules.batchnorm._NormBase
    return frozenset(
        f"{path}.{name}" if path else name
        for path, owner in module.named_modules()
        if isinstance(owner, kept) and owner.track_running_stats
        for name, _ in owner.named_parameters(recurse=False)
    )


def make_layout(
    params: Mapping[str, torch.nn.Parameter],
    *,
    config: Config,
    group_of: Mapping[str, int],
    islands: frozenset[str] = frozenset(),
    split: Split = WHOLE,
    units: Units = NO_UNITS,
    world: int,
) -> Layout:
    """Where each piece of `params` lives; `islands` keep their dtype. Pure: no process group."""
    section = config.zero_optimization
    specs = [
        _spec(fqn, param, config, group_of, keep=fqn in islands)._replace(
            tie=split.tied.get(fqn, ()), unit=units.unit_of.get(fqn, ROOT), chunk=_chunk(fqn, split)
        )
        for fqn, param in params.items()
    ]
    upper = min(section.reduce_bucket_size, layouts.MAX_BUCKET_NUMEL)
    # A unit is gathered in one piece if it may be, so its buckets are not cut smaller for the backward's sake.
    limit = upper if units.order else layouts.bucket_limit(sum(spec.numel for spec in specs), upper)
    stage = layouts.STAGES[section.stage]
    asked = PLACES[section.offload_param.device], PLACES[section.offload_optimizer.device]
    places = layouts.places(stage, param=asked[0], optim=asked[1])
    return layouts.plan(specs, stage=stage, world=world, limit=limit, places=places)


def _chunk(fqn: str, split: Split) -> int | None:
    return None if fqn in split.tied else split.chunk_of.get(fqn)


def make_units(
    module: torch.nn.Module, *, config: Config, targets: Sequence[str], split: Split, data_ranks: int
) -> Units:
    """What is gathered together, at stage 3 on several ranks: repeated blocks and large layers, a pipeline's
    layers, or what the config names. Nothing can be done inside a call that is compiled, so what lies inside one of
    `targets` is gathered with it.

    Raises:
        ConfigError: a name that matches nothing, or a block named inside a compiled module.
    """
    section = config.zero_optimization
    alone = data_ranks == 1 and PLACES[section.offload_param.device] is Place.DEVICE
    if layouts.STAGES[section.stage].param is Placement.REPLICATED or alone:
        return NO_UNITS
    named = section.blocks
    if named is not None:
        blocks = pick(module, named, key="zero_optimization.blocks")
    elif split.calls is not None:
        blocks = split.calls
    else:
        blocks = find_blocks(module)
        inlined = compiled_by_user(module)
        layers = large_layers(module, beside=blocks)
        blocks += tuple(fqn for fqn in layers if not any(fqn != outer and _within(fqn, outer) for outer in inlined))
    blocks = tuple(block for block in blocks if block)
    inside = [(block, target) for block in blocks for target in targets if block != target and _within(block, target)]
    if inside and named is not None:
        block, target = inside[0]
        raise ConfigError(
            f"zero_optimization.blocks names {block!r}, which lies inside the compile target {target!r}: "
            f"nothing can be gathered inside a compiled call. Name {block!r} (or its class) in compile.scope as well, "
            "or leave it out of zero_optimization.blocks"
        )
    swallowed = {block for block, _ in inside}
    kept = [block for block in blocks if block not in swallowed]
    kept += [target for target in targets if target and not any(_within(target, block) for block in kept)]
    units = find_units(module, kept, split=split)
    return units if ROOT not in targets else units._replace(gates={ROOT: units.gates[ROOT]})


def _within(fqn: str, outer: str) -> bool:
    """Whether module `fqn` is `outer` or inside it."""
    return outer == ROOT or fqn == outer or fqn.startswith(outer + ".")


def _spec(fqn: str, param: torch.nn.Parameter, config: Config, group_of: Mapping[str, int], *, keep: bool) -> ParamSpec:
    dtype = param.dtype if keep else _compute_dtype(param, config)
    grad_dtype = torch.float32 if dtype in LOW_PRECISION else dtype
    chosen = config.data_types.grad_accum_dtype
    if chosen is not None and dtype.is_floating_point:
        grad_dtype = DTYPES[chosen]
    group = group_of.get(fqn) if param.requires_grad else None
    return ParamSpec(fqn, tuple(param.shape), dtype, grad_dtype, group)


def _compute_dtype(param: torch.nn.Parameter, config: Config) -> torch.dtype:
    low = config.low_precision
    return DTYPES[low] if low is not None and param.is_floating_point() else param.dtype


def build(
    params: Mapping[str, torch.nn.Parameter],
    *,
    config: Config,
    group_of: Mapping[str, int],
    islands: frozenset[str],
    units: Units,
    base: torch.optim.Optimizer | None,
    split: Split,
    mesh: Mesh,
    device: torch.device,
) -> Plan:
    """Lay `params` out and make it run. Collective on all ranks: parameters become the first rank's of each stage.

    State that the optimizer has already (a run goes on, or its constructor makes some) goes with its parameters.
    """
    given = [] if base is None else _state_so_far(base, params)
    layout = make_layout(
        params, config=config, group_of=group_of, islands=islands, split=split, units=units, world=mesh.data.size
    )
    census = take(layout, mesh, device)
    if (
        base is not None
        and mesh.data.size > 1
        and layout.stage.optim is Placement.SHARDED
        and needs_whole_tensors(base)
    ):
        raise cannot_shard(base)  # before the model is touched
    depots = mesh.world.together(lambda: _make_depots(layout, config, device), doing="sheer.initialize: offload")
    _check_room(layout, depots, base, mesh)
    runtime = _make_runtime(layout, params, config=config, mesh=mesh, device=device, units=units, depots=depots)
    if base is None:
        return Plan(layout, runtime, None, census)
    optimizer = _make_optimizer(base, runtime, depots)
    if given:
        _hand_over(optimizer, given, mesh.data)
    return Plan(layout, runtime, optimizer, census)


class _Given(NamedTuple):
    """One state that an optimizer had before the engine was built."""

    key: str
    fqn: str
    form: str
    tensor: torch.Tensor
    of: torch.dtype
    """The dtype its parameter had."""


def _state_so_far(base: torch.optim.Optimizer, params: Mapping[str, torch.nn.Parameter]) -> list[_Given]:
    given = []
    for fqn, param in params.items():
        for key, value in base.state.get(param, {}).items():
            if value is None:
                continue
            form = form_of(value, param)
            if form is None:
                raise UsageError(
                    f"optimizer state {key!r} of parameter {fqn!r} is a {type(value).__name__}; tensors and numbers "
                    "can be taken over"
                )
            given.append(_Given(key, fqn, form, as_tensor(value).detach(), param.dtype))
    return given


def _hand_over(optimizer: FlatOptimizer, given: list[_Given], axis: Axis) -> None:
    forms: dict[str, str] = {}
    for one in given:
        # A 0-d parameter cannot tell an element from a scalar; others can.
        if forms.get(one.key) != StateForm.ELEMENT:
            forms[one.key] = one.form
    saved: dict[str, dict[str, SavedState]] = {}
    for one in given:
        dtype = one.tensor.dtype
        if forms[one.key] == StateForm.ELEMENT and dtype is one.of and dtype in LOW_PRECISION:
            dtype = torch.float32  # as the master that it follows from now on
        saved.setdefault(one.fqn, {})[one.key] = SavedState(tuple(one.tensor.shape), dtype)
    incoming = optimizer.blank(saved, forms, rank=axis.rank, world=axis.size)
    restate.fill(incoming.pieces, (restate.Whole(one.key, one.fqn, one.tensor) for one in given))
    optimizer.adopt(incoming)


def _make_runtime(
    layout: Layout,
    params: Mapping[str, torch.nn.Parameter],
    *,
    config: Config,
    mesh: Mesh,
    device: torch.device,
    units: Units,
    depots: Depots,
    source: Source | None = None,
) -> ZeroRuntime:
    wire = config.communication_data_type
    prescale = 1.0 / config.gradient_predivide_factor if config.prescale_gradients else 1.0
    ahead = config.zero_optimization.stage3_prefetch_bucket_size > 0
    wiring = Wiring(None if wire is None else DTYPES[wire], prescale, ahead)
    return ZeroRuntime(
        layout, params, mesh=mesh, device=device, wiring=wiring, depots=depots, units=units, source=source
    )


def _make_depots(layout: Layout, config: Config, device: torch.device) -> Depots:
    """What the places of a layout are on this machine."""
    zero = config.zero_optimization

    def depot(place: Place, section: OffloadOptimizer | OffloadParam, key: str) -> Depot:
        if place is Place.DEVICE:
            return DeviceMemory(device)
        if place is Place.HOST:
            return HostMemory(device, pinned=section.pin_memory)
        assert section.nvme_path is not None, "the config has been checked"
        return Files(section.nvme_path, key=f"zero_optimization.{key}.nvme_path")

    param, grad, optim = layout.places
    return Depots(
        param=depot(param, zero.offload_param, "offload_param"),
        grad=depot(grad, zero.offload_optimizer, "offload_optimizer"),
        optim=depot(optim, zero.offload_optimizer, "offload_optimizer"),
    )


def _check_room(
    layout: Layout, depots: Depots, base: torch.optim.Optimizer | None, mesh: Mesh, *, states: int = 1
) -> None:
    """Find out on all ranks at once, before anything changes, whether what is to be in files has room there, the
    optimizer's state so many times.

    Raises ConfigError on every rank. Collective on all ranks where files are used.
    """
    if Place.FILES not in layout.places:
        return
    at_rest = layout.nbytes()
    needed = at_rest["master"][1] + (0 if base is None else states * _state_nbytes(layout, base, mesh.data.rank))
    with ExitStack() as held:

        def reserve() -> None:
            held.enter_context(depots.param.reserve(at_rest["param"][1]))
            held.enter_context(depots.optim.reserve(needed))

        mesh.world.together(reserve, doing="offload")


def _state_nbytes(layout: Layout, base: torch.optim.Optimizer, rank: int) -> int:
    """What `base` is going to keep of a rank's masters."""
    total = 0
    for bucket in layout.buckets:
        if bucket.key.group is not None:
            made = expected_state(base, bucket.key.group, layout.master_dtype(bucket))
            total += layout.owned(bucket, rank).numel * sum(dtype.itemsize for dtype in made.values())
    return total


def _make_optimizer(
    base: torch.optim.Optimizer, runtime: ZeroRuntime, depots: Depots, *, given: list[list[torch.Tensor]] | None = None
) -> FlatOptimizer:
    masters = [Master(grad.flat.plan, grad.flat.owned, grad.flat.master) for grad in runtime.grads]
    # Where results travel at once, or not all can be in memory, the update goes bucket by bucket.
    in_parts = runtime.gathers or runtime.layout.places.optim is not Place.DEVICE
    return FlatOptimizer(base, masters, depot=depots.optim, in_parts=in_parts, given=given)


def rebuild(
    old: Plan,
    params: Mapping[str, torch.nn.Parameter],
    *,
    config: Config,
    group_of: Mapping[str, int],
    islands: frozenset[str],
    units: Units,
    split: Split,
    mesh: Mesh,
    device: torch.device,
) -> Plan:
    """A new plan after parameters were frozen or unfrozen: masters and optimizer state go with their names.

    Collective on all ranks.
    """
    axis, optimizer = mesh.data, old.optimizer
    layout = make_layout(
        params, config=config, group_of=group_of, islands=islands, split=split, units=units, world=mesh.data.size
    )
    census = take(layout, mesh, device)
    depots = old.runtime.depots
    # What comes in lies beside the new optimizer's own room until it is adopted.
    _check_room(layout, depots, None if optimizer is None else optimizer.base, mesh, states=2)
    pieces = [] if optimizer is None else _everything(optimizer)
    offers = restate.describe(pieces, axis)
    forms = {} if optimizer is None else merged_forms(optimizer, axis)
    old.runtime.remove_hooks()
    old.runtime.gathering.close()
    with old.runtime.whole_values() as source:
        runtime = _make_runtime(
            layout, params, config=config, mesh=mesh, device=device, units=units, depots=depots, source=source
        )
    if optimizer is None:
        return Plan(layout, runtime, None, census)
    renewed = _make_optimizer(optimizer.base, runtime, depots, given=optimizer.given)
    saved = restate.saved_states(offers)
    trained = {slot.fqn for bucket in layout.buckets if bucket.trainable for slot in bucket.slots}
    with_master = {fqn for fqn in trained if saved.get(fqn, {}).pop(MASTER, None) is not None}
    incoming = renewed.blank(saved, forms | {MASTER: StateForm.ELEMENT}, rank=axis.rank, world=axis.size)
    masters = [piece for piece in _master_pieces(renewed) if piece.fqn in with_master]
    restate.fill([*incoming.pieces, *masters], restate.wholes(pieces, offers, axis=axis, device=device))
    renewed.adopt(incoming)
    return Plan(layout, runtime, renewed, census)


def _everything(optimizer: FlatOptimizer) -> list[StatePiece]:
    parked = [piece for piece in optimizer.parked if piece.key == MASTER]
    return [*optimizer.export(), *_master_pieces(optimizer), *parked]


def merged_forms(optimizer: FlatOptimizer, axis: Axis) -> dict[str, str]:
    """The form of every optimizer state on any rank. Collective."""
    merged: dict[str, str] = {}
    for forms in axis.gather_objects(optimizer.forms()):
        merged.update(forms)
    return merged


def _master_pieces(optimizer: FlatOptimizer) -> Iterator[StatePiece]:
    for master in optimizer.masters:
        for piece in master.bucket.pieces(master.owned):
            at = piece.offset - master.owned.start
            data = master.tensor[at : at + piece.stop - piece.start]
            yield StatePiece(MASTER, piece.fqn, piece.shape, piece.start, data)
