"""What autograd saves inside a block's call, while parameters are sharded.

Views of a unit's memory may be saved, and that memory is freed when the call ends. It is filled again before a backward
comes to the call by its output; a tensor that leaves the call by another way (an attribute, a list) may lead there
earlier. So everything that is saved is marked where it is such a view, and asks for its unit when it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from sheer.errors import UsageError
from sheer.zero.autograd import storage_of

_top = torch._C._autograd._top_saved_tensors_default_hooks
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


_Saved = tuple[torch.Tensor, int | None]
"""A tensor and its version when it was saved, which torch does not check for us; None where it is a unit's memory."""
_Pack = Callable[[torch.Tensor], Any]
_Unpack = Callable[[Any], torch.Tensor]


class _Marked:
    """Unpacks what was marked. A backward in two halves may do that in both."""

    __slots__ = ("_want",)

    def __init__(self, want: Callable[[], None]) -> None:
        self._want = want

    def __call__(self, saved: _Saved) -> torch.Tensor:
        tensor, version = saved
        if version is None:
            self._want()
        elif tensor._version != version:
            raise _changed(tensor, version)
        return tensor


def runs_twice(hook: object) -> bool:
    """Whether `hook`, which unpacks a saved tensor, is this module's own, and so may run more than once."""
    return isinstance(hook, _Marked)


class Memory(NamedTuple):
    """Storages that matter to what is saved in a call."""

    ours: frozenset[int]
    """Of the units that the call needs."""
    blanks: Mapping[int, str]
    """What stands for a unit that is not here -> its name."""


def begin_saving(memory: Memory, want: Callable[[], None]) -> bool:
    """From here to `end_saving`, `want` is called before anything is used that was saved of `memory`, and what stands
    for a parameter is refused. False where torch allows no such hooks."""
    if not _allowed():
        return False
    pack, unpack = _marking(memory, want)
    outer = _top(True)
    if outer is not None:
        pack, unpack = _around(memory, outer, pack, unpack)
    _push(pack, unpack)
    return True


def _marking(memory: Memory, want: Callable[[], None]) -> tuple[_Pack, _Unpack]:
    ours, blanks = memory

    def pack(tensor: torch.Tensor) -> _Saved:
        storage = storage_of(tensor)
        if storage in ours:
            return tensor, None
        if storage in blanks:
            raise _away(blanks[storage])
        return tensor, tensor._version

    return pack, _Marked(want)


class _Outer(NamedTuple):
    """What hooks of the user's (a checkpoint's, for one) have made of a tensor."""

    saved: Any


def _around(memory: Memory, outer: tuple[_Pack, _Unpack], pack: _Pack, unpack: _Unpack) -> tuple[_Pack, _Unpack]:
    """Torch calls the innermost hooks only; those outside get what is not ours."""

    def pack_both(tensor: torch.Tensor) -> Any:
        return pack(tensor) if storage_of(tensor) in memory.ours else _Outer(outer[0](tensor))

    def unpack_both(saved: Any) -> torch.Tensor:
        return outer[1](saved.saved) if isinstance(saved, _Outer) else unpack(saved)

    return pack_both, unpack_both


def end_saving() -> None:
    """What is saved from here on is as before `begin_saving`."""
    _pop()


def _away(name: str) -> UsageError:
    return UsageError(
        f"a parameter of {name} was read inside the call of another block while it was sharded (stage 3), so only a "
        "placeholder was. Pass what is needed of it as an argument, or say so on all ranks after sheer.initialize: "
        "sheer.zero.register_external_parameter(module, parameter)"
    )


def _changed(tensor: torch.Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version} "
        "instead. torch.autograd.set_detect_anomaly(True) finds the operation that saved it."
    )
