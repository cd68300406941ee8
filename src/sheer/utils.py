"""Reading and writing one parameter's state while it is sharded, by DeepSpeed's names. All are collective, but for what
says otherwise.

`local` is the part of a parameter that this rank updates, whatever the stage: one interval of it, flattened (all of it
at stage 0; it may be empty).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sheer import restate
from sheer.data import RepeatingLoader as RepeatingLoader
from sheer.errors import UsageError, did_you_mean
from sheer.layout import Interval, overlap
from sheer.optim.forms import StateForm
from sheer.zero import assemble, runtime_of

if TYPE_CHECKING:
    from sheer.engine import Engine
    from sheer.optim.pieces import StatePiece
    from sheer.zero.grads import BucketGrad


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """The parameter's fp32 value (its master where it has one), full shape, a copy. None if no engine trains it."""
    found = _find(param)
    if found is None:
        return None
    engine, grad, index = found
    _heed_user(grad)
    return _full(engine, grad, index, grad.flat.master).float()


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite the parameter and its master with `value` (full shape, equal on all ranks)."""
    _, grad, index = _required(param)
    grad.flat.adopt()
    _write(grad, index, grad.flat.master, value)
    with torch.no_grad():
        grad.flat.write(index, value)


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """The mean gradient over ranks and micro-batches, full shape, a copy, without the loss scale; between backward and
    step. None where there is none, or no engine trains the parameter."""
    found = _with_gradient(param)
    if found is None:
        return None
    engine, grad, index = found
    return _full(engine, grad, index, grad.owned()).float() / engine.loss_scale()


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite the mean gradient that the coming step will use (full shape, equal on all ranks)."""
    engine, grad, index = _to_write_gradient(param)
    _write(grad, index, grad.owned(), value * engine.loss_scale())


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """One optimizer state of the parameter ("exp_avg", "step", ...), full shape, a copy; None before the first step."""
    found = _find(param)
    if found is None:
        return None
    engine, grad, index = found
    optimizer = engine.flat_optimizer()
    fqn = grad.flat.plan.slots[index].fqn
    pieces = [piece for piece in optimizer.export() if piece.fqn == fqn]
    offers = restate.describe(pieces, engine.axis)
    states = restate.saved_states(offers).get(fqn, {})
    if not states:
        return None
    if optim_state_key not in states:
        raise UsageError(
            f"{fqn!r} has no optimizer state {optim_state_key!r}; it has {sorted(states)}."
            f"{did_you_mean(optim_state_key, states)}"
        )
    everything = restate.wholes(pieces, offers, axis=engine.axis, device=engine.device)
    return {whole.key: whole.tensor for whole in everything}[optim_state_key]


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Overwrite one per-element optimizer state of the parameter (full shape, equal on all ranks)."""
    engine, grad, index = _required(param)
    optimizer = engine.flat_optimizer()
    slot = grad.flat.plan.slots[index]
    if optimizer.forms().get(optim_state_key) != StateForm.ELEMENT:
        raise UsageError(
            f"{slot.fqn!r}: {optim_state_key!r} is not a per-element optimizer state; there are "
            f"{sorted(key for key, form in optimizer.forms().items() if form == StateForm.ELEMENT)}"
        )
    _check_shape(slot.fqn, slot.shape, value)
    flat = value.reshape(-1)
    for piece in _local_states(engine, grad, index, optim_state_key):
        piece.data.copy_(flat[piece.start : piece.start + piece.data.numel()])


# --- the part of one rank ---------------------------------------------------------------------------------------------


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the parameter's fp32 value, flat, a copy. None if no engine trains it. Not collective."""
    found = _find(param)
    if found is None:
        return None
    _, grad, index = found
    _heed_user(grad)
    return _part(grad, index, grad.flat.master).float().clone()


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite this rank's part of the parameter and its master; every rank gives its own."""
    engine, grad, index = _required(param)
    _heed_user(grad)
    _write_part(grad, index, grad.flat.master, value)
    safe_set_full_fp32_param(param, _full(engine, grad, index, grad.flat.master))


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's part of `safe_get_full_grad`, flat, a copy."""
    found = _with_gradient(param)
    if found is None:
        return None
    engine, grad, index = found
    return _part(grad, index, grad.owned()).float() / engine.loss_scale()


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite this rank's part of the mean gradient that the coming step will use; every rank gives its own."""
    engine, grad, index = _to_write_gradient(param)
    _write_part(grad, index, grad.owned(), value * engine.loss_scale())


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of one optimizer state, flat, a copy; a state that is not per element is on the rank that has
    the parameter's first one. None where this rank has none. Not collective."""
    found = _find(param)
    if found is None:
        return None
    engine, grad, index = found
    parts = [piece.data.reshape(-1) for piece in _local_states(engine, grad, index, optim_state_key)]
    return torch.cat(parts) if parts else None


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Overwrite this rank's part of one optimizer state; nothing where it has none. Not collective."""
    engine, grad, index = _required(param)
    pieces = _local_states(engine, grad, index, optim_state_key)
    fqn, flat, at = grad.flat.plan.slots[index].fqn, value.detach().reshape(-1), 0
    _check_part(fqn, sum(piece.data.numel() for piece in pieces), flat)
    for piece in pieces:
        piece.data.view(-1).copy_(flat[at : at + piece.data.numel()])
        at += piece.data.numel()


# --- finding and moving -----------------------------------------------------------------------------------------------


def _find(param: torch.nn.Parameter) -> tuple[Engine, BucketGrad, int] | None:
    runtime = runtime_of(param)
    engine = None if runtime is None or runtime.owner is None else runtime.owner()
    if runtime is None or engine is None:
        return None
    for grad in runtime.grads:
        for index, one in enumerate(grad.flat.params):
            if one is param:
                return engine, grad, index  # type: ignore[return-value]
    return None


def _required(param: torch.nn.Parameter) -> tuple[Engine, BucketGrad, int]:
    found = _find(param)
    if found is None:
        raise UsageError(f"a tensor of shape {tuple(param.shape)} is no parameter that a living engine trains")
    return found


def _with_gradient(param: torch.nn.Parameter) -> tuple[Engine, BucketGrad, int] | None:
    """`_find`, with the gradient reduced; None where no rank has one."""
    found = _find(param)
    if found is None:
        return None
    engine, grad, index = found
    if not engine.reduce_now():
        return None
    return found if grad.used[index] or _used_anywhere(engine, grad, index) else None


def _to_write_gradient(param: torch.nn.Parameter) -> tuple[Engine, BucketGrad, int]:
    """`_required`, with the gradient reduced and counted as one that is there."""
    engine, grad, index = _required(param)
    engine.reduce_now(to_write=True)
    grad.used[index] = 1
    return engine, grad, index


def _heed_user(grad: BucketGrad) -> None:
    """Let the master follow what the user has changed."""
    grad.flat.adopt()
    grad.flat.notice_writes()
    grad.flat.absorb()


def _used_anywhere(engine: Engine, grad: BucketGrad, index: int) -> bool:
    return any(engine.axis.gather_objects(bool(grad.used[index])))


def _full(engine: Engine, grad: BucketGrad, index: int, owned: torch.Tensor) -> torch.Tensor:
    """The whole of parameter `index`, put together from every rank's `owned` part of its bucket."""
    flat = grad.flat
    return assemble(flat.plan, index, owned, owned=flat.owned, axis=engine.axis, device=engine.device)


def _write(grad: BucketGrad, index: int, owned: torch.Tensor, value: torch.Tensor) -> None:
    slot, mine = grad.flat.plan.slots[index], grad.flat.owned
    _check_shape(slot.fqn, slot.shape, value)
    flat = value.detach().reshape(-1)
    for piece in grad.flat.plan.pieces(mine):
        if piece.fqn == slot.fqn:
            owned[piece.offset - mine.start :][: piece.stop - piece.start].copy_(flat[piece.start : piece.stop])


def _part(grad: BucketGrad, index: int, owned: torch.Tensor) -> torch.Tensor:
    """What of parameter `index` is in `owned`, this rank's part of something that goes with its bucket; a view."""
    slot, mine = grad.flat.plan.slots[index], grad.flat.owned
    part = overlap(Interval(slot.start, slot.stop), mine)
    return owned[:0] if part is None else owned[part.start - mine.start : part.stop - mine.start]


def _write_part(grad: BucketGrad, index: int, owned: torch.Tensor, value: torch.Tensor) -> None:
    part, flat = _part(grad, index, owned), value.detach().reshape(-1)
    _check_part(grad.flat.plan.slots[index].fqn, part.numel(), flat)
    part.copy_(flat)


def _local_states(engine: Engine, grad: BucketGrad, index: int, key: str) -> list[StatePiece]:
    fqn, optimizer = grad.flat.plan.slots[index].fqn, engine.flat_optimizer()
    return [piece for piece in optimizer.export() if piece.fqn == fqn and piece.key == key]


def _check_part(fqn: str, numel: int, flat: torch.Tensor) -> None:
    if flat.numel() != numel:
        raise UsageError(f"this rank has {numel} elements of {fqn!r}, the value given has {flat.numel()}")


def _check_shape(fqn: str, shape: tuple[int, ...], value: torch.Tensor) -> None:
    if tuple(value.shape) != shape:
        raise UsageError(f"{fqn!r} has shape {shape}, the value given has {tuple(value.shape)}")
