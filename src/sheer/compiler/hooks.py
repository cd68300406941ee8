"""A target's own module hooks, run outside the trace in the order in which `nn.Module` runs them.

`nn.Module._call_impl` cannot be asked to call anything but `self.forward`, so the order is written out here. Two kinds
never get here (the slot hands such calls to torch): hooks on every module, and the old `register_backward_hook`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

Forward = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def call(module: nn.Module, *, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`module(*args, **kwargs)` with `forward` in the place of `module.forward`."""
    if not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks):
        return forward(module, args, kwargs)
    hooked = _HookedCall(module, args, kwargs)
    try:
        return hooked.run(forward)
    except Exception:
        hooked.run_always_called()
        raise


class _HookedCall:
    """One call of one module with hooks; keeps what a hook with `always_call` must see when something raises."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module: Any = module  # what is asked of it is not typed in torch
        self._args = args
        self._kwargs = kwargs
        self._result: Any = None
        self._ran: set[int] = set()

    def run(self, forward: Forward) -> Any:
        module = self._module
        backward_pre = module._get_backward_pre_hooks() if module._backward_pre_hooks else []
        backward = module._get_backward_hooks()[0] if module._backward_hooks else []
        self._run_pre_hooks()
        boundary: Any = BackwardHook(module, backward, backward_pre) if backward or backward_pre else None
        if boundary is not None:
            self._args = boundary.setup_input_hook(self._args)
        self._result = forward(module, self._args, self._kwargs)
        self._run_forward_hooks()
        if boundary is not None:
            if not isinstance(self._result, torch.Tensor | tuple):
                warnings.warn(
                    "For backward hooks to be called, module output should be a Tensor or a tuple of Tensors"
                    f" but received {type(self._result)}",
                    stacklevel=6,
                )
            self._result = boundary.setup_output_hook(self._result)
        return self._result

    def _run_pre_hooks(self) -> None:
        module = self._module
        for hook_id, hook in tuple(module._forward_pre_hooks.items()):
            if hook_id in module._forward_pre_hooks_with_kwargs:
                replaced = hook(module, self._args, self._kwargs)
                if replaced is None:
                    continue
                if not (isinstance(replaced, tuple) and len(replaced) == 2):
                    raise RuntimeError(
                        f"forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {replaced}."
                    )
                self._args, self._kwargs = replaced
            else:
                replaced = hook(module, self._args)
                if replaced is not None:
                    self._args = replaced if isinstance(replaced, tuple) else (replaced,)

    def _run_forward_hooks(self) -> None:
        for hook_id, hook in tuple(self._module._forward_hooks.items()):
            if hook_id in self._module._forward_hooks_always_called:
                self._ran.add(hook_id)
            self._run_forward_hook(hook_id, hook)

    def _run_forward_hook(self, hook_id: int, hook: Callable[..., Any]) -> None:
        if hook_id in self._module._forward_hooks_with_kwargs:
            replaced = hook(self._module, self._args, self._kwargs, self._result)
        else:
            replaced = hook(self._module, self._args, self._result)
        if replaced is not None:
            self._result = replaced

    def run_always_called(self) -> None:
        """After an exception: the `always_call` hooks that have not run yet; what they raise is only warned about."""
        for hook_id, hook in tuple(self._module._forward_hooks.items()):
            if hook_id not in self._module._forward_hooks_always_called or hook_id in self._ran:
                continue
            try:
                self._run_forward_hook(hook_id, hook)
            except Exception as error:
                warnings.warn(
                    "module forward hook with ``always_call=True`` raised an exception"
                    f" that was silenced as another error was raised in forward: {error}",
                    stacklevel=5,
                )
