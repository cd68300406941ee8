"""The one thing of ours on a user's module: the object in the slot that `nn.Module.__call__` asks first.

`nn.Module` keeps what `Module.compile()` makes in `module.__dict__["_compiled_call_impl"]`. A `Slot` stands there. A
user cannot meet it: `state_dict`, `repr`, pickles, deep copies and hooks are as without it.
"""

from __future__ import annotations

import enum
import weakref
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules.module import _has_any_global_hook

from sheer.compiler import hooks
from sheer.compiler.forwards import Shared, forward_function
from sheer.compiler.report import Report

KEY = "_compiled_call_impl"
_ABSENT = object()

_hooks_of = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Inputs(NamedTuple):
    """Positional and keyword arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Gate(Protocol):
    """The engine's own work around every call of one module, compiled or not, outside the user's hooks."""

    def enter(self, inputs: Inputs) -> Inputs:
        """Before the call; what it gives is what the module is called with."""

    def leave(self, output: Any) -> Any:
        """After the call; what it gives is what the caller gets."""

    def abort(self) -> None:
        """Instead of `leave`, when the call raised."""


class Eager(enum.Enum):
    """Why a call of a compiled target runs eagerly. The value completes the sentence "... runs eagerly: "."""

    GLOBAL_HOOK = "a hook on every module is registered"
    """`register_module_forward_hook` and its like also fire for the modules inside, which a graph cannot do."""
    OLD_HOOK = "it has a register_backward_hook hook, which sees the last operation of the module"
    """The last operation of a compiled forward is the whole graph, so the hook would see other gradients."""
    INNER_HOOK = "a module inside it has a hook"
    """A graph traced without the hook would skip it silently."""
    PATCHED = "its forward is no longer the one that was compiled"
    """Set on the instance or the class after compiling was switched on; often for one call, so not compiled anew."""
    DISPATCH_MODE = "a torch dispatch mode is active"
    """Dynamo, called first under one, would skip this code for good."""
    TRANSFORM = "a torch.func transform is active"
    """`vmap`, `grad` and the like see every operation, as without compile."""


class Below:
    """The modules inside a target, watched for hooks.

    Looks at every one on every call, so nothing added late is missed: about 0.2 microseconds for each.
    """

    def __init__(self) -> None:
        self._attributes: list[dict[str, Any]] = []
        self._children: list[nn.Module | None] | None = None

    def is_hooked(self, module: nn.Module) -> bool:
        """Whether any module inside `module` has a hook of its own."""
        if self._children is None or _children_of(module, self._attributes) != self._children:
            self._attributes = [found.__dict__ for found in module.modules() if found is not module]
            self._children = _children_of(module, self._attributes)
        return any(map(any, map(_hooks_of, self._attributes)))

    def forget(self, _module: object = None) -> None:
        """Keep no module alive; called when the target goes."""
        self._attributes.clear()
        self._children = None


class Slot:
    """Called by torch in the place of `module._call_impl`, for one module, which it knows only weakly.

    `gate` and `forward` are set by the `Compiler`; either may be None. One way of copying is beyond it: `copy.copy` of
    a module whose own `__getstate__` keeps all of `__dict__` shares the slot, and so calls the original.
    """

    def __init__(self, module: nn.Module, *, fqn: str, report: Report) -> None:
        self.fqn = fqn
        self.gate: Gate | None = None
        self.called = False
        self._forward: Shared | None = None
        self._below = Below()
        self._module = weakref.ref(module, self._below.forget)
        self._report = report
        self._noted: set[Eager] = set()
        self._before: Any = _ABSENT

    # ---- standing in the module

    @property
    def module(self) -> nn.Module:
        """The module; the caller must hold it alive."""
        module = self._module()
        assert module is not None
        return module

    @property
    def alive(self) -> nn.Module | None:
        """The module, or None where it is gone."""
        return self._module()

    @property
    def holder(self) -> object:
        """What stands in the module's slot now: this object, nothing (None), or what somebody else put there."""
        module = self._module()
        return None if module is None else module.__dict__.get(KEY)

    @property
    def users(self) -> Any:
        """What the user's own `module.compile()` has made, which is called inside the gate; None where nothing."""
        return None if self._before is _ABSENT else self._before

    @property
    def forward(self) -> Shared | None:
        """The compiled forward; None where the module runs eagerly."""
        return self._forward

    def compile_with(self, forward: Shared | None) -> None:
        """Run this forward from now on; None: run eagerly."""
        self._forward = forward
        self._noted.clear()
        self.called = False

    def settle(self) -> None:
        """Stand in the module if there is anything to do here, else leave it exactly as it was."""
        module = self._module()
        if module is None:
            return
        needed = self.gate is not None or self._forward is not None
        if needed and self.holder is not self:
            self._before = module.__dict__.get(KEY, _ABSENT)
            module.__dict__[KEY] = self
        elif not needed and self.holder is self:
            if self._before is _ABSENT:
                del module.__dict__[KEY]
            else:
                module.__dict__[KEY] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module is a plain module with weights of its own."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A pickled module is a plain module."""
        return (type(None), ())

    # ---- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`module(*args, **kwargs)`."""
        gate = self.gate
        if gate is None:
            return self._call(self.module, args, kwargs)
        args, kwargs = gate.enter(Inputs(args, kwargs))
        try:
            output = self._call(self.module, args, kwargs)
        except BaseException:
            gate.abort()
            raise
        return gate.leave(output)

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own hooks around its forward."""
        self.called = True
        if self._forward is None and self.users is not None:
            return self.users(*args, **kwargs)
        if self._forward is None or _is_traced():
            return _eagerly(module, args, kwargs)
        if _has_any_global_hook():  # type: ignore[no-untyped-call]
            self._note(Eager.GLOBAL_HOOK)
            return _eagerly(module, args, kwargs)
        if module._backward_hooks and not module._is_full_backward_hook:
            self._note(Eager.OLD_HOOK)
            return _eagerly(module, args, kwargs)
        return hooks.call(module, forward=self._compiled_or_eager, args=args, kwargs=kwargs)

    def _compiled_or_eager(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward itself. Decided after the module's pre-hooks ran: they may put a hook on an inner module."""
        reason = self._why_eager(module)
        if reason is not None:
            self._note(reason)
            return module.forward(*args, **kwargs)
        assert self._forward is not None
        return self._forward.copy()(self.fqn, module, args, kwargs)

    def _why_eager(self, module: nn.Module) -> Eager | None:
        assert self._forward is not None
        if forward_function(module) is not self._forward.function:
            return Eager.PATCHED
        if self._below.is_hooked(module):
            return Eager.INNER_HOOK
        if torch._C._len_torch_dispatch_stack():
            return Eager.DISPATCH_MODE
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return Eager.TRANSFORM
        return None

    def _note(self, reason: Eager) -> None:
        if reason not in self._noted:
            self._noted.add(reason)
            self._report.add_fallback(self.fqn, reason=reason.value)


def _is_traced() -> bool:
    """Whether somebody else records this call: then the module is a part of that record, as without us."""
    return bool(torch.compiler.is_compiling() or torch._C._get_tracing_state() or is_fx_symbolic_tracing())


def _eagerly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch does where nobody stands in the slot."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _children_of(module: nn.Module, below: list[dict[str, Any]]) -> list[nn.Module | None]:
    """The children of `module` and of all modules below it, whose `__dict__` are given."""
    return [child for attributes in (module.__dict__, *below) for child in attributes["_modules"].values()]
