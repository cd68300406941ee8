"""Private compiled copies of `forward` functions.

What is compiled is a copy of the function with a code object of its own. Dynamo keeps graphs, guards and limits per
code object, so these are ours alone: nobody else's calls use or fill them, and forgetting them is exact. File and line
stay the user's. Targets that are alike (same function, same modules and parameter shapes below them) share one copy per
grad mode, so that twelve equal blocks compile once and inference never disturbs the graphs of training.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import reset_code

from sheer.compiler.backends import Settings, compile_function
from sheer.compiler.records import Mark, Origin, Records, place_of_code
from sheer.compiler.report import Report
from sheer.errors import CompileError


def forward_function(module: nn.Module) -> types.FunctionType | None:
    """The Python function behind `module.forward`, patches on class or instance included; None where it has none.

    None also where compiling is not ours to do: `forward` is already compiled, or marked `torch.compiler.disable`.
    """
    patched = module.__dict__.get("forward")
    function = type(module).forward if patched is None else getattr(patched, "__func__", None)
    if not isinstance(function, types.FunctionType) or (patched is not None and patched.__self__ is not module):
        return None
    marks = function.__dict__
    if "_torchdynamo_orig_callable" in marks or "_torchdynamo_disable" in marks:
        return None
    return function


class Copy:
    """One private copy, compiled."""

    def __init__(self, function: types.FunctionType, *, settings: Settings, training: bool, report: Report) -> None:
        from torch._dynamo.exc import BackendCompilerFailed

        own = _private(function)
        self._code = own.__code__
        self._compiled = compile_function(own, settings)
        self._place = place_of_code(own.__code__)
        self._training = training
        self._backend_failed = BackendCompilerFailed
        self._records = Records()
        self._report = report
        self._fresh = True

    def __call__(self, target: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the compiled forward of `module`, known as `target`, and take note of what was compiled meanwhile."""
        mark = self._records.mark()
        try:
            output = self._compiled(module, *args, **kwargs)
        except self._backend_failed as error:
            raise CompileError(
                f"the compile backend failed on {target!r} ({type(module).__name__}): {error}\n"
                'Choose another "backend" ("aot_eager" generates no code), leave this module out of "scope", or set'
                ' "enabled": false.'
            ) from error
        finally:
            graphs = self._read(target, mark) if self._records.moved(mark) else 0
        if self._fresh:
            self._fresh = False
            if not graphs and not self._report.fell_back(target):
                self._report.add_fallback(target, reason=f"torch compiled nothing of {type(module).__name__}.forward")
        return output

    def _read(self, target: str, mark: Mark) -> int:
        return self._report.read(Origin(target, self._place, self._training), mark=mark, records=self._records)

    def forget(self) -> None:
        """Drop graphs and guards."""
        reset_code(self._code)


class Shared:
    """The forward of targets that are alike: a copy for training and one for inference, made when first called."""

    def __init__(self, function: types.FunctionType, *, make: Callable[[types.FunctionType, bool], Copy]) -> None:
        self.function = function
        self._make = make
        self._copies: dict[bool, Copy] = {}

    def copy(self) -> Copy:
        """The copy for the grad mode of now."""
        grad = torch.is_grad_enabled()
        found = self._copies.get(grad)
        if found is None:
            found = self._copies[grad] = self._make(self.function, grad)
        return found

    def forget(self) -> None:
        """Drop both copies."""
        for copy in self._copies.values():
            copy.forget()
        self._copies.clear()


class Forwards:
    """All forwards one `Compiler` has compiled."""

    def __init__(self, settings: Settings, *, report: Report) -> None:
        self._settings = settings
        self._report = report
        self._shared: dict[Hashable, Shared] = {}

    def share(self, module: nn.Module) -> Shared | None:
        """The forward that `module` has in common with all targets like it; None where it cannot be compiled."""
        function = forward_function(module)
        if function is None:
            return None
        return self._shared.setdefault((function, _likeness(module)), Shared(function, make=self._copy))

    def forget(self) -> None:
        """Drop everything that was compiled."""
        for shared in self._shared.values():
            shared.forget()
        self._shared.clear()

    def _copy(self, function: types.FunctionType, training: bool) -> Copy:
        return Copy(function, settings=self._settings, training=training, report=self._report)


def _private(function: types.FunctionType) -> types.FunctionType:
    """`function` with a code object of its own.

    Torch's own modules lie in files that dynamo does not trace from the top. Around their forward comes a frame of
    ours, else torch would put one there whose code, and so whose graphs and limits, all of its users share.
    """
    from torch._dynamo import trace_rules

    if trace_rules.check(function):
        frame = _frame_around(function)
        code = frame.__code__.replace(co_name=function.__qualname__)
        return types.FunctionType(code, frame.__globals__, frame.__name__, None, frame.__closure__)
    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _frame_around(function: types.FunctionType) -> types.FunctionType:
    def frame(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    assert isinstance(frame, types.FunctionType)
    return frame


def _likeness(module: nn.Module) -> Hashable:
    """What makes two modules one to the compiler: classes and parameter shapes. Blocks of other widths count their
    recompiles apart, else the eight differing blocks of a convolutional network would reach torch's limit."""
    return tuple(
        (name, type(found), tuple((key, p.shape, p.dtype) for key, p in found.named_parameters(recurse=False)))
        for name, found in module.named_modules()
    )
