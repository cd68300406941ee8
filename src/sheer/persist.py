"""Saving and loading a run: the engine's parts, all that a checkpoint holds of them, or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sheer import checkpoint
from sheer import device as devices
from sheer.checkpoint import Background, Names, Opened, Shard, Source
from sheer.config import Config
from sheer.errors import CheckpointError, UsageError, did_you_mean
from sheer.observe import Teller
from sheer.optim.flat import FlatOptimizer
from sheer.planning import Plan, merged_forms
from sheer.shards import (
    OPTIM,
    optimizer_shards,
    persistent_buffers,
    replaced,
    saved_optimizer_states,
    settle,
    shards_to_save,
    wanted_buffers,
    wanted_params,
)
from sheer.zero import GatheredParameters

_IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""How a group is computed, which is this run's business, not the checkpoint's."""
_SCHEDULED = frozenset({"lr", "initial_lr", "betas", "momentum"})
"""What schedules move: no news when it differs."""
# Optimizers that keep the same state and mean the same by it.
_ALIKE = frozenset({"Adam", "AdamW"})


@dataclass
class Counters:
    """What a run counts. Only the engine and a load write it."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0

    def advance(self, *, skipped: bool, samples: int, micro_batches: int) -> int:
        """One step is over; the number of steps applied so far. `micro_batches` are those not counted yet."""
        self.micro_steps += micro_batches
        self.global_samples += samples
        if skipped:
            self.skipped_steps += 1
        else:
            self.global_steps += 1
        return self.global_steps


class SavedParts(NamedTuple):
    """What of an engine a checkpoint holds."""

    module: torch.nn.Module
    plan: Plan
    params: Mapping[str, torch.nn.Parameter]
    ties: Mapping[str, str]
    groups: Mapping[str, int]
    config: Config
    device: torch.device
    counters: Counters
    scheduler: Any
    loss_scale: Any
    loader: Any
    teller: Teller


class Loaded(NamedTuple):
    """What a load brought besides state."""

    path: Path
    client_state: dict[str, Any]


@torch.inference_mode(False)  # what is made here is kept, and written to again
def save(
    parts: SavedParts,
    root: str | os.PathLike[str],
    *,
    tag: str,
    client_state: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
    background: Background | None,
) -> None:
    """Write a checkpoint; with `background`, beside training once its content is copied. Collective on all ranks."""
    mesh, section = parts.plan.runtime.mesh, parts.config.checkpoint
    axis = mesh.world
    axis.assemble("save_checkpoint", timeout=section.timeout_seconds)
    if len(set(axis.gather_objects(background is None))) > 1:
        raise UsageError("save_checkpoint: `blocking` is not the same on every rank; pass the same, or leave it out")
    everything = _of_all_stages(parts)
    without = frozenset(everything.frozen) if exclude_frozen else frozenset[str]()

    def prepare() -> _Prepared:
        _check_in_place(parts)
        parts.plan.runtime.heed_user()
        tensors = {fqn: tensor for fqn, tensor in buffers.items() if everything.holders[fqn] == mesh.stage}
        shards = shards_to_save(parts.plan.runtime, parts.plan.optimizer, tensors, without=without)
        return _Prepared(shards, {**_state(parts, client_state), "extra_state": everything.extra_state})

    buffers = persistent_buffers(parts.module).tensors
    prepared = checkpoint.together(axis, "save_checkpoint", prepare)
    forms = {} if parts.plan.optimizer is None else merged_forms(parts.plan.optimizer, axis)
    begun = checkpoint.begin(
        root,
        tag,
        shards=prepared.shards,
        facts={
            **_facts(parts, forms),
            "groups": everything.groups,
            "ties": everything.ties,
            "frozen": sorted(everything.frozen),
            "left_out": sorted(without),
        },
        state=prepared.state,
        rng=devices.rng_states(parts.device),
        axis=axis,
        save_latest=save_latest,
        keep_last=section.keep_last,
        local=section.use_node_local_storage,
        timeout=section.timeout_seconds,
    )
    if background is None:
        checkpoint.finish(begun, prepared.shards, axis=axis)
        return
    try:
        beside = axis.beside()
        depot = parts.plan.runtime.depots.optim
        room = depot if depot.paged else None
        checkpoint.together(
            axis, begun.doing, lambda: background.snapshot(prepared.shards, later=_only_a_step_changes, depot=room)
        )
    except BaseException:
        begun.close()
        raise
    background.start(begun, axis=beside)


def _only_a_step_changes(shard: Shard) -> bool:
    """The optimizer's state; parameters and buffers are the user's too."""
    return shard.kind.startswith(OPTIM)


class _Names(NamedTuple):
    """What one stage, or all, have by name."""

    ties: dict[str, str]
    groups: dict[str, int]
    frozen: set[str]
    holders: dict[str, int]
    """Buffer -> the first stage that has it, which saves it."""
    extra_state: dict[str, Any]


def _of_all_stages(parts: SavedParts) -> _Names:
    """Collective on the pipe axis."""
    mesh, buffers = parts.plan.runtime.mesh, persistent_buffers(parts.module)
    mine = _Names(
        ties={**parts.ties, **buffers.ties},
        groups={fqn: group for fqn, group in parts.groups.items() if fqn in parts.params},
        frozen={fqn for fqn, param in parts.params.items() if not param.requires_grad},
        holders=dict.fromkeys(buffers.tensors, mesh.stage),
        extra_state=_extra_state(parts.module),
    )
    told: list[_Names] = mesh.pipe.gather_objects(mine)
    told.reverse()  # the first stage has the last word
    return _Names(
        ties={alias: fqn for stage in told for alias, fqn in stage.ties.items()},
        groups={fqn: group for stage in told for fqn, group in stage.groups.items()},
        frozen={fqn for stage in told for fqn in stage.frozen},
        holders={fqn: holder for stage in told for fqn, holder in stage.holders.items()},
        extra_state={fqn: extra for stage in told for fqn, extra in stage.extra_state.items()},
    )


def _check_in_place(parts: SavedParts) -> None:
    """Refuse to save other values than the module has: parameters that the engine does not know."""
    others = replaced(parts.module, parts.params, among=parts.params)
    if others:
        raise UsageError(
            f"parameter {others[0]!r} ({len(others)} in all) is another Parameter object than when the engine was "
            "built (assigned anew, or by load_state_dict(assign=True)): it does not train, and what would be saved is "
            "the old one. Copy values in place, or destroy the engine and build another"
        )


class _Prepared(NamedTuple):
    """What one rank brings to a save."""

    shards: list[Shard]
    state: dict[str, Any]


def _facts(parts: SavedParts, forms: Mapping[str, str]) -> dict[str, Any]:
    config = parts.config
    facts: dict[str, Any] = {
        "run": {
            "stage": config.zero_optimization.stage,
            "world": parts.plan.runtime.mesh.world.size,
            "pipeline_stages": parts.plan.runtime.mesh.stages,
            "precision": config.low_precision or "as given",
            "compiled": config.compile.enabled,
            "module": type(parts.module).__qualname__,
        },
    }
    if parts.plan.optimizer is not None:
        facts["optimizer"] = {"class": type(parts.plan.optimizer.base).__name__, "forms": dict(forms)}
    if parts.scheduler is not None:
        facts["scheduler"] = {"class": type(parts.scheduler).__name__}
    return facts


def _state(parts: SavedParts, client_state: Mapping[str, Any]) -> dict[str, Any]:
    optimizer = parts.plan.optimizer
    state: dict[str, Any] = {
        "counters": asdict(parts.counters),
        "extra_state": _extra_state(parts.module),
        "client_state": dict(client_state),
    }
    if optimizer is not None:
        state["groups"] = [_hyperparameters(group) for group in optimizer.base.param_groups]
    for name, part in (("scheduler", parts.scheduler), ("loss_scale", parts.loss_scale), ("loader", parts.loader)):
        if part is not None:
            state[name] = part.state_dict()
    return state


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key != "params"
    }


def _extra_state(module: torch.nn.Module) -> dict[str, Any]:
    """What modules add to `state_dict` by `get_extra_state`; it must be JSON, as everything here."""
    plain = torch.nn.Module.get_extra_state
    return {
        fqn: owner.get_extra_state()
        for fqn, owner in module.named_modules()
        if type(owner).get_extra_state is not plain
    }


class Wish(NamedTuple):
    """What a load is to restore besides parameters and buffers."""

    strict: bool
    """Names must be the same in the checkpoint and here."""
    names: Names
    """Which tensors, and what they are called here."""
    optimizer: bool
    """The optimizer's state."""
    reset: bool
    """The optimizer is to forget the state it has."""
    settings: bool
    """Hyper-parameters become the checkpoint's, where the optimizer's state is loaded."""
    scheduler: bool
    run: bool
    """Counters, loss scale, loader position and random state."""


@torch.inference_mode(False)  # as for `save`
def load(
    parts: SavedParts, root: str | os.PathLike[str], *, tag: str | None, wish: Wish, custom: Callable[..., Any] | None
) -> Loaded | None:
    """Load a checkpoint into a running engine's parts; None where there is none. Collective on all ranks."""
    opened = _open(parts, root, tag, wish)
    if opened is None:
        parts.teller.warn(f"load_checkpoint: there is no checkpoint in {root}; nothing was loaded")
        return None
    mesh, doing = parts.plan.runtime.mesh, f"loading checkpoint {opened.index.directory}"
    axis = mesh.world
    modules = set[str]().union(*mesh.pipe.gather_objects({fqn for fqn, _ in parts.module.named_modules()}))
    checkpoint.together(axis, doing, lambda: _check_fits(parts, opened, wish, modules))
    checkpoint.together(axis, doing, parts.plan.runtime.heed_user)
    before = _state(parts, {})
    apart = _settings_apart(parts, opened.state) if wish.optimizer else []
    try:
        checkpoint.together(axis, doing, lambda: _restore_settings(parts, opened.state, wish))
        if custom is not None:
            checkpoint.together(axis, doing, lambda: _load_by_hand(parts, opened, custom))
        _load_tensors(parts, opened, wish, module=custom is None)
    except BaseException:
        _restore_settings(parts, before, wish)
        raise
    if wish.run:
        _restore_run(parts, opened)
    _tell(parts, opened, apart, wish)
    return Loaded(opened.index.directory, opened.state["client_state"])


def _open(parts: SavedParts, root: str | os.PathLike[str], tag: str | None, wish: Wish) -> Opened | None:
    names = wish.names
    axis, section = parts.plan.runtime.mesh.world, parts.config.checkpoint
    local, timeout = section.use_node_local_storage, section.timeout_seconds
    alike = {name: value for name, value in wish._asdict().items() if name != "names"}
    opened = checkpoint.open_any(
        root, tag, axis=axis, groups=lambda: _named_groups(parts), local=local, timeout=timeout, alike=alike
    )
    if opened is None:
        return None
    tensors = {*parts.params, *parts.ties, *persistent_buffers(parts.module).tensors}
    wanted = set[str]().union(*parts.plan.runtime.mesh.pipe.gather_objects(tensors))

    def read() -> Opened:
        extra = {names.here(fqn): value for fqn, value in opened.state["extra_state"].items()}
        state = {**opened.state, "extra_state": {fqn: value for fqn, value in extra.items() if names.has(fqn)}}
        return replace(opened, index=names.of(opened.index, wanted=wanted), state=state)

    return checkpoint.together(axis, f"loading checkpoint {opened.index.directory}", read)


def _named_groups(parts: SavedParts) -> list[list[str]] | None:
    """The names in each optimizer group, in its order; None where one rank does not know them all."""
    if parts.plan.runtime.mesh.stages > 1 or parts.plan.optimizer is None:
        return None
    groups: list[list[str]] = [[] for _ in parts.plan.optimizer.base.param_groups]
    for fqn, group in parts.groups.items():
        groups[group].append(fqn)
    return groups


def _load_by_hand(parts: SavedParts, opened: Opened, custom: Callable[..., Any]) -> None:
    """The user's function moves parameters and buffers; it cannot be undone."""
    with GatheredParameters(parts.module):
        custom(src=checkpoint.read_full(opened.index, reader=opened.reader), dst=parts.module)
    parts.plan.runtime.heed_user()


def _load_tensors(parts: SavedParts, opened: Opened, wish: Wish, *, module: bool) -> None:
    index, runtime, flat = opened.index, parts.plan.runtime, parts.plan.optimizer
    buffers = persistent_buffers(parts.module)
    ties = {**parts.ties, **buffers.ties}
    buffer_shards, landings = wanted_buffers(buffers)
    wanted, kinds = list[Shard](), set[str]()
    if module:
        wanted = [shard for shard in wanted_params(runtime) + buffer_shards if _chosen(shard.name, ties, wish.names)]
        kinds = {"param", "buffer"}
    incoming, fresh = None, list[Shard]()
    if wish.optimizer and flat is not None:
        forms = index.facts.get("optimizer", {}).get("forms", {})
        saved = saved_optimizer_states(index, parts.params, ties, forms)
        incoming = checkpoint.together(
            runtime.mesh.world,
            f"loading checkpoint {index.directory}",
            lambda: flat.blank(saved, forms, rank=runtime.axis.rank, world=runtime.axis.size, reuse=True),
        )
        wanted += optimizer_shards(flat, incoming.in_use)
        fresh = optimizer_shards(flat, incoming.pieces)
        kinds |= {kind for kind in index.kinds if kind.startswith(OPTIM)}
    left_out = set(index.facts.get("left_out", ()))
    checkpoint.load(
        index,
        wanted=wanted,
        fresh=fresh,
        axis=runtime.mesh.world,
        reader=opened.reader,
        fetch=opened.fetch,
        kinds=kinds,
        ties=ties,
        allow_missing=(lambda key: key.name in left_out) if wish.strict else True,
        allow_unexpected=not wish.strict,
        timeout=parts.config.checkpoint.timeout_seconds,
    )
    settle([landing for landing in landings if any(landing.flat is shard.data for shard in wanted)])
    if incoming is not None and flat is not None:
        flat.adopt(incoming)
    elif wish.reset and flat is not None:
        flat.adopt(flat.blank({}, {}, rank=runtime.axis.rank, world=runtime.axis.size))
    runtime.publish_all()


def _chosen(fqn: str, ties: Mapping[str, str], names: Names) -> bool:
    return names.has(fqn, *(alias for alias, owner in ties.items() if owner == fqn))


def _check_fits(parts: SavedParts, opened: Opened, wish: Wish, modules: Collection[str]) -> None:
    """Refuse before anything changes what would fail, or be misread, while it is restored. `modules` are those of all
    stages."""
    index, state, flat = opened.index, opened.state, parts.plan.optimizer
    if wish.optimizer and flat is not None:
        _check_same_optimizer(index, flat)
        _check_same_groups(state, flat)
    if wish.scheduler and parts.scheduler is not None:
        _check_same_scheduler(index, state, parts.scheduler)
    if wish.run and parts.loader is not None and "loader" in state:
        parts.loader.check_state(state["loader"])
    gone = next((fqn for fqn in state["extra_state"] if fqn not in modules), None)
    if gone is not None and wish.strict:
        raise CheckpointError(
            f"the checkpoint has extra state (get_extra_state) of module {gone!r}, which this model does not have."
            f"{did_you_mean(gone, modules)} Load with load_module_strict=False to leave it out."
        )


def _check_same_optimizer(index: Source, optimizer: FlatOptimizer) -> None:
    """Refuse the state of another kind of optimizer, which would be misread, and what has no meaning here."""
    told = index.facts.get("optimizer", {})
    if "unreadable" in told:
        raise CheckpointError(
            f"the optimizer state of {index.directory} cannot be taken over: {told['unreadable']}. Build the optimizer "
            "groups that it was saved with, or load with load_optimizer_states=False."
        )
    saved = told.get("class")
    mine = type(optimizer.base).__name__
    if saved is None or saved == mine or {saved, mine} <= _ALIKE:
        return
    raise CheckpointError(
        f"the checkpoint holds the state of optimizer {saved}, this run uses {mine}. Load with "
        "load_optimizer_states=False to take the parameters and start the optimizer afresh."
    )


def _check_same_groups(state: Mapping[str, Any], flat: FlatOptimizer) -> None:
    saved, mine = state.get("groups"), flat.base.param_groups
    if saved is not None and len(saved) != len(mine):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} optimizer groups, this run {len(mine)}. Build the same groups, or load "
            "with load_optimizer_states=False."
        )


def _check_same_scheduler(index: Source, state: Mapping[str, Any], scheduler: Any) -> None:
    """torch's schedulers take over any state without a look at it; one of another class must have the same fields."""
    mend = "Load with load_lr_scheduler_states=False to start its schedule anew."
    if "scheduler" not in state:
        raise CheckpointError(f"the checkpoint has no scheduler state, this run has a scheduler. {mend}")
    saved, mine = index.facts.get("scheduler", {}).get("class"), type(scheduler).__name__
    if saved != mine and state["scheduler"].keys() != scheduler.state_dict().keys():
        raise CheckpointError(f"the checkpoint holds the state of scheduler {saved}, this run uses {mine}. {mend}")
    theirs, ours = _groups_scheduled(state["scheduler"]), _groups_scheduled(scheduler.state_dict())
    if theirs != ours:
        raise CheckpointError(
            f"the checkpoint's scheduler ({saved}) goes with {theirs} optimizer groups, this run's with {ours}. {mend}"
        )


def _groups_scheduled(state: Mapping[str, Any]) -> int | None:
    """For how many optimizer groups a scheduler keeps values; None where it does not say."""
    return next((len(state[key]) for key in ("base_lrs", "min_lrs") if isinstance(state.get(key), list)), None)


def _restore_settings(parts: SavedParts, state: Mapping[str, Any], wish: Wish) -> None:
    """Everything but tensors that user code takes part in; `state` as from `_state`, so that it can be undone."""
    flat = parts.plan.optimizer
    modules = dict(parts.module.named_modules())
    for fqn, extra in state["extra_state"].items():
        if fqn in modules:
            modules[fqn].set_extra_state(extra)
    scheduled = wish.scheduler and parts.scheduler is not None
    if flat is not None and (wish.optimizer or scheduled):
        for group, saved in zip(flat.base.param_groups, state.get("groups", ()), strict=False):
            # A schedule goes on from the learning rate it stood at.
            at_least = {"lr": saved["lr"]} if scheduled else {}
            _restore_group(group, saved if wish.optimizer and wish.settings else at_least)
    if scheduled:
        parts.scheduler.load_state_dict(state["scheduler"])
    if wish.run and parts.loss_scale is not None and "loss_scale" in state:
        parts.loss_scale.load_state_dict(state["loss_scale"])


def _restore_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        if key in _IMPLEMENTATION:
            continue
        current = group.get(key)
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        else:
            group[key] = value


def _settings_apart(parts: SavedParts, state: Mapping[str, Any]) -> list[str]:
    """Hyper-parameters in which this run differs from the checkpoint, described."""
    flat = parts.plan.optimizer
    if flat is None:
        return []
    moving = _IMPLEMENTATION if parts.scheduler is None else _IMPLEMENTATION | _SCHEDULED
    return [
        f"group {number}: {key} {mine[key]!r} here, {saved[key]!r} in the checkpoint"
        for number, (group, saved) in enumerate(zip(flat.base.param_groups, state.get("groups", ()), strict=False))
        for mine in [_hyperparameters(group)]
        for key in sorted(mine.keys() & saved.keys() - moving)
        if mine[key] != saved[key]
    ]


def _restore_run(parts: SavedParts, opened: Opened) -> None:
    """What cannot fail: it has been checked and is our own."""
    for name, value in opened.state["counters"].items():
        setattr(parts.counters, name, value)
    if parts.loader is not None and "loader" in opened.state:
        parts.loader.load_state_dict(opened.state["loader"])
    if opened.rng is not None:
        devices.set_rng_states(parts.device, opened.rng)


def _tell(parts: SavedParts, opened: Opened, apart: list[str], wish: Wish) -> None:
    """What a load did that may surprise."""
    for line in opened.said:
        parts.teller.info(f"load_checkpoint: {line}")
    if apart and wish.settings:
        parts.teller.warn(
            f"load_checkpoint: the checkpoint's hyper-parameters replace this run's: {', '.join(apart)}. To keep "
            "this run's, load with load_hyperparameters=False, or set them in engine.optimizer.param_groups now"
        )
    elif apart:
        parts.teller.info(f"load_checkpoint: this run's hyper-parameters stay: {', '.join(apart)}")
    if wish.optimizer and parts.plan.optimizer is not None and "groups" not in opened.state:
        parts.teller.warn("load_checkpoint: the checkpoint has no optimizer state; the optimizer starts afresh")
    world, size = opened.index.world, parts.plan.runtime.mesh.world.size
    if wish.run and world < size:
        who = f"rank {world} keeps its" if size == world + 1 else f"ranks {world} to {size - 1} keep their"
        parts.teller.warn(f"load_checkpoint: it was saved by fewer ranks ({world}), so {who} own random state")
