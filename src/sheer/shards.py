"""Between a model's buckets and the checkpoint room: which shards there are to save, and where loaded ones go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from sheer.checkpoint import Key, Shard, Source
from sheer.layout import LOW_PRECISION, Piece, Split
from sheer.optim.flat import FlatOptimizer
from sheer.optim.forms import StateForm
from sheer.optim.pieces import SavedState, StatePiece
from sheer.zero import FlatBucket, ZeroRuntime

OPTIM = "optim."


class Buffers(NamedTuple):
    """The persistent buffers of a module by name, each once."""

    tensors: Mapping[str, torch.Tensor]
    ties: Mapping[str, str]


class Landing(NamedTuple):
    """A place to load a buffer into that is not flat memory itself."""

    flat: torch.Tensor
    buffer: torch.Tensor


def names_and_ties(
    module: torch.nn.Module, split: Split | None = None
) -> tuple[dict[str, torch.nn.Parameter], dict[str, str]]:
    """The module's parameters by their own names, each once, and alias -> own name for tied ones."""
    canonical = {} if split is None else split.canonical
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    params: dict[str, torch.nn.Parameter] = {}
    for fqn, param in module.named_parameters(remove_duplicate=False):
        own = first.setdefault(id(param), canonical.get(fqn, fqn))
        params.setdefault(own, param)
        if own != fqn:
            ties[fqn] = own
    return params, ties


def replaced(module: torch.nn.Module, params: Mapping[str, torch.nn.Parameter], *, among: Iterable[str]) -> list[str]:
    """Those `among` the names of `params` that are other Parameter objects in `module` now."""
    found = []
    for fqn in among:
        owner, _, name = fqn.rpartition(".")
        try:
            now = module.get_submodule(owner)._parameters.get(name)
        except AttributeError:  # the module was taken out
            continue
        if now is not None and fqn in params and now is not params[fqn]:
            found.append(fqn)
    return found


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
    runtime: ZeroRuntime,
    optimizer: FlatOptimizer | None,
    buffers: Mapping[str, torch.Tensor],
    *,
    without: frozenset[str],
) -> list[Shard]:
    """This rank's part: an interval of every bucket, so that over all ranks every element is written once.

    fp32 masters are what is written of low-precision parameters. Buffers are the first rank's of each stage, which is
    to give those that no earlier stage has; parameters that several stages hold are the first one's.
    """
    others = {slot.fqn for flat in runtime.flats if not runtime.counts(flat.plan) for slot in flat.plan.slots}
    without |= others
    shards = [shard for flat in runtime.flats for shard in _param_shards(flat, runtime) if shard.name not in without]
    if runtime.axis.rank == 0:
        shards += [
            Shard("buffer", fqn, tuple(buffer.shape), 0, buffer.detach().reshape(-1)) for fqn, buffer in buffers.items()
        ]
    if optimizer is not None:
        within = {i: m.bucket.shard(runtime.axis.rank) for i, m in enumerate(optimizer.masters)}
        shards += [
            Shard(OPTIM + piece.key, piece.fqn, piece.shape, piece.start, piece.data.detach(), optimizer.depot.rest)
            for piece in optimizer.export(within=within)
            if piece.fqn not in others
        ]
    return shards


def _param_shards(flat: FlatBucket, runtime: ZeroRuntime) -> Iterator[Shard]:
    for piece in flat.plan.pieces(flat.plan.shard(runtime.axis.rank)):
        yield _param_shard(flat, piece)


def _param_shard(flat: FlatBucket, piece: Piece) -> Shard:
    """A piece of a parameter, as exact as it is known here."""
    data = flat.master[piece.offset - flat.owned.start :][: piece.stop - piece.start]
    return Shard("param", piece.fqn, piece.shape, piece.start, data, flat.rest)


# --- loading ----------------------------------------------------------------------------------------------------------


def wanted_params(runtime: ZeroRuntime) -> list[Shard]:
    """Where parameters are to be loaded: masters where there are some, else this rank's part of the buffers."""
    return [_param_shard(flat, piece) for flat in runtime.flats for piece in flat.plan.pieces(flat.owned)]


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


def saved_optimizer_states(
    index: Source, params: Mapping[str, torch.nn.Parameter], ties: Mapping[str, str], forms: Mapping[str, str]
) -> dict[str, dict[str, SavedState]]:
    """What `index` has of the optimizer's state, under this model's names: fqn -> key -> SavedState.

    Per-element state in the dtype that its parameter was saved in comes in the dtype that it is updated in here.
    """
    aliases: dict[str, list[str]] = {}
    for alias, owner in ties.items():
        aliases.setdefault(owner, []).append(alias)
    saved: dict[str, dict[str, SavedState]] = {}
    keys = sorted(kind.removeprefix(OPTIM) for kind in index.kinds if kind.startswith(OPTIM))
    for fqn, param in params.items():
        candidates = [fqn, *aliases.get(fqn, ())]
        candidates += [index.ties[name] for name in list(candidates) if name in index.ties]
        of_param = _entry(index, "param", candidates)
        for key in keys:
            entry = _entry(index, OPTIM + key, candidates)
            if entry is None:
                continue
            dtype = entry.torch_dtype
            if forms.get(key) == StateForm.ELEMENT and of_param is not None and of_param.torch_dtype is dtype:
                dtype = torch.float32 if param.dtype in LOW_PRECISION else param.dtype
            saved.setdefault(fqn, {})[key] = SavedState(tuple(entry.shape), dtype)
    return saved


def _entry(index: Source, kind: str, names: list[str]) -> Any:
    """The first of `names` that `index` has as a `kind`; None where it has none."""
    return next((entry for name in names if (entry := index.entry(Key(kind, name))) is not None), None)


def optimizer_shards(optimizer: FlatOptimizer, pieces: list[StatePiece]) -> list[Shard]:
    """Where optimizer state is to be loaded."""
    rest = optimizer.depot.rest
    return [Shard(OPTIM + piece.key, piece.fqn, piece.shape, piece.start, piece.data, rest) for piece in pieces]
