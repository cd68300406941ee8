"""Between an engine's parts and the checkpoint room: which shards there are to save, and where loaded ones go."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sheer import checkpoint
from sheer import device as devices
from sheer.checkpoint import Index, Key, Shard
from sheer.config import Config
from sheer.errors import CheckpointError
from sheer.observe import Teller
from sheer.optim.flat import FlatOptimizer, SavedState, StatePiece
from sheer.planning import Plan, merged_forms
from sheer.zero import FlatBucket, ZeroRuntime

OPTIM = "optim."
# Optimizers that keep the same state and mean the same by it.
_ALIKE = frozenset({"Adam", "AdamW"})


class Buffers(NamedTuple):
    """The persistent buffers of a module by name, each once."""

    tensors: Mapping[str, torch.Tensor]
    ties: Mapping[str, str]


class Landing(NamedTuple):
    """A place to load a buffer into that is not flat memory itself."""

    flat: torch.Tensor
    buffer: torch.Tensor


def names_and_ties(module: torch.nn.Module) -> tuple[dict[str, torch.nn.Parameter], dict[str, str]]:
    """The module's parameters by fully qualified name, each once, and alias -> name for tied ones."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    params: dict[str, torch.nn.Parameter] = {}
    for fqn, param in module.named_parameters(remove_duplicate=False):
        if id(param) in first:
            ties[fqn] = first[id(param)]
        else:
            first[id(param)] = fqn
            params[fqn] = param
    return params, ties


def persistent_buffers(module: torch.nn.Module) -> Buffers:
    """What `state_dict` would hold of the module's buffers."""
    first: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner._buffers.items():
            if buffer is None or name in owner._non_persistent_buffers_set:
                continue
            fqn = f"{path}.{name}" if path else name
            if id(buffer) in first:
                ties[fqn] = first[id(buffer)]
            else:
                first[id(buffer)] = fqn
                tensors[fqn] = buffer
    return Buffers(tensors, ties)


# --- saving -----------------------------------------------------------------------------------------------------------


def shards_to_save(
    runtime: ZeroRuntime, optimizer: FlatOptimizer | None, buffers: Buffers, *, without: frozenset[str]
) -> list[Shard]:
    """This rank's part: an interval of every bucket, so that over all ranks every element is written once.

    fp32 masters are what is written of low-precision parameters. Buffers are rank 0's.
    """
    shards = [shard for flat in runtime.flats for shard in _param_shards(flat, runtime) if shard.name not in without]
    if runtime.axis.rank == 0:
        shards += [
            Shard("buffer", fqn, tuple(buffer.shape), 0, buffer.detach().reshape(-1))
            for fqn, buffer in buffers.tensors.items()
        ]
    if optimizer is not None:
        within = {i: m.bucket.shard(runtime.axis.rank) for i, m in enumerate(optimizer.masters)}
        shards += [
            Shard(OPTIM + piece.key, piece.fqn, piece.shape, piece.start, piece.data.detach())
            for piece in optimizer.export(within=within)
        ]
    return shards


def _param_shards(flat: FlatBucket, runtime: ZeroRuntime) -> Iterator[Shard]:
    for piece in flat.plan.pieces(flat.plan.shard(runtime.axis.rank)):
        yield Shard(
            "param", piece.fqn, piece.shape, piece.start, _elements(flat, piece.offset, piece.stop - piece.start)
        )


def _elements(flat: FlatBucket, offset: int, numel: int) -> torch.Tensor:
    """Elements [offset, offset + numel) of the bucket, as exact as they are known here."""
    if flat.has_master:
        return flat.master[offset - flat.owned.start :][:numel]
    return flat.full[offset : offset + numel]


# --- loading ----------------------------------------------------------------------------------------------------------


def wanted_params(runtime: ZeroRuntime) -> list[Shard]:
    """Where parameters are to be loaded: masters where there are some, else this rank's part of the buffers."""
    return [
        Shard("param", piece.fqn, piece.shape, piece.start, _elements(flat, piece.offset, piece.stop - piece.start))
        for flat in runtime.flats
        for piece in flat.plan.pieces(flat.owned)
    ]


def wanted_buffers(buffers: Buffers) -> tuple[list[Shard], list[Landing]]:
    """Where buffers are to be loaded; `Landing`s are to be copied on once everything has arrived."""
    shards, landings = [], []
    for fqn, buffer in buffers.tensors.items():
        flat = buffer.detach().view(-1) if buffer.is_contiguous() else torch.empty_like(buffer).reshape(-1)
        if not buffer.is_contiguous():
            landings.append(Landing(flat, buffer))
        shards.append(Shard("buffer", fqn, tuple(buffer.shape), 0, flat))
    return shards, landings


def settle(landings: list[Landing]) -> None:
    """Copy loaded buffers on to where they live."""
    with torch.no_grad():
        for flat, buffer in landings:
            buffer.copy_(flat.view(buffer.shape))


def saved_optimizer_states(index: Index, names: Mapping[str, Any], ties: Mapping[str, str]) -> dict[str, Any]:
    """What `index` has of the optimizer's state, under this model's names: fqn -> key -> SavedState."""
    aliases: dict[str, list[str]] = {}
    for alias, owner in ties.items():
        aliases.setdefault(owner, []).append(alias)
    saved: dict[str, dict[str, SavedState]] = {}
    keys = sorted(kind.removeprefix(OPTIM) for kind in index.kinds if kind.startswith(OPTIM))
    for fqn in names:
        candidates = [fqn, *aliases.get(fqn, ())]
        candidates += [index.ties[name] for name in list(candidates) if name in index.ties]
        for key in keys:
            entry = next((e for e in (index.entry(Key(OPTIM + key, name)) for name in candidates) if e), None)
            if entry is not None:
                saved.setdefault(fqn, {})[key] = SavedState(tuple(entry.shape), entry.torch_dtype)
    return saved


def optimizer_shards(pieces: list[StatePiece]) -> list[Shard]:
    """Where optimizer state is to be loaded."""
    return [Shard(OPTIM + piece.key, piece.fqn, piece.shape, piece.start, piece.data) for piece in pieces]


def check_same_optimizer(index: Index, optimizer: FlatOptimizer) -> None:
    """Refuse the state of another kind of optimizer, which would be misread."""
    saved = index.facts.get("optimizer", {}).get("class")
    mine = type(optimizer.base).__name__
    if saved is None or saved == mine or {saved, mine} <= _ALIKE:
        return
    raise CheckpointError(
        f"the checkpoint holds the state of optimizer {saved}, this run uses {mine}. Load with "
        "load_optimizer_states=False to take the parameters and start the optimizer afresh."
    )


# --- a run ------------------------------------------------------------------------------------------------------------


@dataclass
class Counters:
    """What a run counts. Only the engine and a load write it."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0

    def advance(self, *, skipped: bool, samples: int) -> int:
        """One step is over; the number of steps applied so far."""
        self.micro_steps += 1
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


def save(
    parts: SavedParts,
    root: str | os.PathLike[str],
    *,
    tag: str,
    client_state: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
) -> None:
    """Write a checkpoint. Collective on the data axis."""
    axis, section = parts.plan.runtime.axis, parts.config.checkpoint
    axis.assemble("save_checkpoint", timeout=section.timeout_seconds)
    buffers = persistent_buffers(parts.module)
    frozen = sorted(fqn for fqn, param in parts.params.items() if not param.requires_grad)
    without = frozenset(frozen) if exclude_frozen else frozenset[str]()
    prepared = checkpoint.together(axis, "save_checkpoint", lambda: _state(parts, client_state))
    forms = {} if parts.plan.optimizer is None else merged_forms(parts.plan.optimizer, axis)
    checkpoint.save(
        root,
        tag,
        shards=shards_to_save(parts.plan.runtime, parts.plan.optimizer, buffers, without=without),
        facts={
            **_facts(parts, forms),
            "ties": {**parts.ties, **buffers.ties},
            "frozen": frozen,
            "left_out": sorted(without),
        },
        state=prepared,
        rng=devices.rng_states(parts.device),
        axis=axis,
        save_latest=save_latest,
        keep_last=section.keep_last,
        timeout=section.timeout_seconds,
    )


def _facts(parts: SavedParts, forms: Mapping[str, str]) -> dict[str, Any]:
    config = parts.config
    facts: dict[str, Any] = {
        "run": {
            "stage": config.zero_optimization.stage,
            "world": parts.plan.runtime.axis.size,
            "precision": "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "as given",
            "compiled": config.compile.enabled,
            "module": type(parts.module).__qualname__,
        },
        "groups": {fqn: group for fqn, group in parts.groups.items() if fqn in parts.params},
    }
    if parts.plan.optimizer is not None:
        facts["optimizer"] = {"class": type(parts.plan.optimizer.base).__name__, "forms": dict(forms)}
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


def load(
    parts: SavedParts,
    root: str | os.PathLike[str],
    *,
    tag: str | None,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    run: bool,
    custom: Callable[..., Any] | None,
) -> Loaded | None:
    """Load a checkpoint into a running engine's parts; None where there is none. Collective on the data axis."""
    runtime, timeout = parts.plan.runtime, parts.config.checkpoint.timeout_seconds
    axis = runtime.axis
    axis.assemble("load_checkpoint", timeout=timeout)
    if (
        checkpoint.on_first(axis, "load_checkpoint", lambda: str(checkpoint.find(root, tag) or "")) == ""
        and tag is None
    ):
        parts.teller.warn(f"load_checkpoint: there is no checkpoint in {root}; nothing was loaded")
        return None
    index = checkpoint.open_together(root, tag, axis=axis, timeout=timeout)
    state = checkpoint.together(axis, f"loading checkpoint {index.directory}", lambda: checkpoint.read_state(index))
    if custom is not None:
        custom(src=checkpoint.load_full(index.directory), dst=parts.module)
        runtime.heed_user()
        return Loaded(index.directory, state["client_state"])
    checkpoint.together(
        axis, "load_checkpoint", lambda: _check_fits(parts, state, optimizer=optimizer, scheduler=scheduler, run=run)
    )
    _load_tensors(parts, index, strict=strict, optimizer=optimizer)
    _restore_run(parts, index, state, optimizer=optimizer, scheduler=scheduler, run=run)
    return Loaded(index.directory, state["client_state"])


def _load_tensors(parts: SavedParts, index: Index, *, strict: bool, optimizer: bool) -> None:
    runtime, flat = parts.plan.runtime, parts.plan.optimizer
    axis = runtime.axis
    buffers = persistent_buffers(parts.module)
    buffer_shards, landings = wanted_buffers(buffers)
    wanted = wanted_params(runtime) + buffer_shards
    kinds = {"param", "buffer"}
    incoming = None
    if optimizer and flat is not None:
        checkpoint.together(axis, "load_checkpoint", lambda: check_same_optimizer(index, flat))
        ties = {**parts.ties, **buffers.ties}
        saved = saved_optimizer_states(index, parts.params, ties)
        forms = index.facts.get("optimizer", {}).get("forms", {})
        incoming = flat.blank(saved, forms, rank=axis.rank, world=axis.size)
        wanted += optimizer_shards(incoming.pieces)
        kinds |= {kind for kind in index.kinds if kind.startswith(OPTIM)}
    left_out = set(index.facts.get("left_out", ()))
    checkpoint.load(
        index,
        wanted=wanted,
        axis=axis,
        kinds=kinds,
        ties={**parts.ties, **buffers.ties},
        allow_missing=(lambda key: key.name in left_out) if strict else True,
        allow_unexpected=not strict,
        timeout=parts.config.checkpoint.timeout_seconds,
    )
    settle(landings)
    if incoming is not None and flat is not None:
        flat.adopt(incoming)
    runtime.publish(frozen=True)


def _check_fits(parts: SavedParts, state: Mapping[str, Any], *, optimizer: bool, scheduler: bool, run: bool) -> None:
    """Refuse before anything changes what would fail while it is restored."""
    flat = parts.plan.optimizer
    groups = state.get("groups")
    if optimizer and flat is not None and groups is not None and len(groups) != len(flat.base.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(groups)} optimizer groups, this run {len(flat.base.param_groups)}. Build the "
            "same groups, or load with load_optimizer_states=False."
        )
    if scheduler and parts.scheduler is not None and "scheduler" not in state:
        raise CheckpointError(
            "the checkpoint has no scheduler state, this run has a scheduler. Load with load_lr_scheduler_states=False "
            "to start its schedule anew."
        )
    if run and parts.loader is not None and "loader" in state:
        parts.loader.check_state(state["loader"])


def _restore_run(
    parts: SavedParts, index: Index, state: Mapping[str, Any], *, optimizer: bool, scheduler: bool, run: bool
) -> None:
    flat = parts.plan.optimizer
    for fqn, extra in state.get("extra_state", {}).items():
        parts.module.get_submodule(fqn).set_extra_state(extra)
    if optimizer and flat is not None:
        for group, saved in zip(flat.base.param_groups, state.get("groups", []), strict=True):
            _restore_hyperparameters(group, saved)
    if scheduler and parts.scheduler is not None:
        parts.scheduler.load_state_dict(state["scheduler"])
    if not run:
        return
    for name, value in state["counters"].items():
        setattr(parts.counters, name, value)
    if parts.loss_scale is not None and "loss_scale" in state:
        parts.loss_scale.load_state_dict(state["loss_scale"])
    if parts.loader is not None and "loader" in state:
        parts.loader.load_state_dict(state["loader"])
    _restore_rng(parts, index)


def _restore_hyperparameters(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        current = group.get(key)
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        else:
            group[key] = value


def _restore_rng(parts: SavedParts, index: Index) -> None:
    rank = parts.plan.runtime.axis.rank
    states = checkpoint.read_rng(index, rank)
    if states is None:
        parts.teller.warn_once(
            "rng", f"the checkpoint was saved by {index.content.world} ranks: ranks beyond keep their random state"
        )
        return
    devices.set_rng_states(parts.device, states)
