"""Compile in place: only the `forward` of chosen modules, with nothing wrapped and everything else outside the trace.

    compiler = Compiler(model, backend="inductor", teller=Teller())
    compiler.enable()            # model(x) is compiled from here on; model.forward(x) never is
    print(compiler.report)
    compiler.disable()           # nothing is left on the model or in dynamo

`targets` says which modules, `slot` is what stands in them, `hooks` runs their own hooks, `forwards` holds what is
compiled, `report` says what happened, `backends` checks that it can happen.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping

from torch import nn

from sheer.compiler.backends import Backend, check_backend, check_kwargs, resolve
from sheer.compiler.forwards import Forwards
from sheer.compiler.report import Break, Fallback, Recompile, Report
from sheer.compiler.slot import Gate, Inputs, Slot
from sheer.compiler.targets import Scope, choose, find_blocks
from sheer.errors import UsageError, did_you_mean
from sheer.observe import Teller

__all__ = [
    "Break",
    "Compiler",
    "Fallback",
    "Gate",
    "Inputs",
    "Recompile",
    "Report",
    "check_backend",
    "find_blocks",
]

_NO_KWARGS: Mapping[str, object] = types.MappingProxyType({})


class Compiler:
    """Switches compiling of one module's targets on and off. Does not keep the module alive.

    Args:
        module: the user's module; it stays the object, class and interface it is.
        backend: a torch backend's name, an import path `pkg.mod.fn`, or a callable `(graph_module, inputs) -> callable`
        kwargs: for `torch.compile` (`dynamic`, `mode`, `options`, ...); `{"disable": True}` compiles nothing.
        scope: `"auto"`, the repeated blocks (see `find_blocks`); `"module"`, the whole module (its gradients are then
            ready only when its whole backward is done); or class names and FQN globs.
        teller: says each fallback, break or recompile storm once.

    Raises:
        ConfigError: a backend, argument or scope that does not exist.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        backend: Backend = "inductor",
        kwargs: Mapping[str, object] = _NO_KWARGS,
        scope: Scope = "auto",
        teller: Teller,
    ) -> None:
        check_kwargs(kwargs)
        self.targets = choose(module, scope=scope)
        self.report = Report(self.targets, teller=teller)
        self._root = weakref.ref(module)
        self._backend = resolve(backend)
        self._kwargs = dict(kwargs)
        self._teller = teller
        self._forwards = Forwards(backend=self._backend, kwargs=self._kwargs, report=self.report)
        self._slots: dict[str, Slot] = {}
        self._scope = scope

    @property
    def enabled(self) -> bool:
        """Whether compiling is switched on."""
        return self.report.active

    def enable(self) -> None:
        """Compile the targets from their next call on. Nothing happens where it is on already or `kwargs` disable it.

        Raises:
            CompileError: the backend does not work on this machine.
        """
        if self.enabled:
            return
        if self._kwargs.get("disable"):
            self._teller.info("compile: kwargs.disable is true, so nothing is compiled")
            return
        module = self._module()
        device = next((p.device for p in module.parameters()), None)
        check_backend(self._backend, kwargs=self._kwargs, device=device)
        self._say_whole(module)
        self.report.active = True
        for fqn in self.targets:
            self._compile(fqn)

    def _say_whole(self, module: nn.Module) -> None:
        if self.targets == ("",):
            why = "" if self._scope == "module" else ", which has no repeated blocks,"
            self._teller.info(
                f"compile: {type(module).__name__}{why} is compiled whole; its gradients are all ready at the end of"
                " its backward, so reducing them does not overlap it"
            )

    def disable(self) -> None:
        """Run everything eagerly again; nothing compiled is left on the module or in dynamo."""
        self.report.active = False
        for slot in self._slots.values():
            slot.compile_with(None)
            slot.settle()
        self._forwards.forget()

    def set_gate(self, fqn: str, gate: Gate | None) -> None:
        """Run `gate` around every call of the module named `fqn`, compiled or not; None takes it away.

        A larger piece that the user traces with `torch.compile` takes the module's forward in, past the gate.

        Raises:
            UsageError: no such module, or it lies inside a compiled target, whose trace the gate's work would enter.
        """
        outer = [target for target in self.targets if target != fqn and (not target or fqn.startswith(target + "."))]
        if gate is not None and outer:
            raise UsageError(
                f"module {fqn!r} lies inside the compile target {outer[0]!r}, so nothing can be run around its calls;"
                f" name {fqn!r} (or its class) in compile.scope instead of {outer[0]!r}"
            )
        slot = self._slot(fqn)
        slot.gate = gate
        slot.settle()

    def review(self) -> None:
        """Note what cannot be seen from inside a call: a target that the user compiled, or that was never called.

        Cheap; for the end of a step.
        """
        if not self.enabled:
            return
        for slot in self._slots.values():
            if slot.forward is None:
                continue
            if slot.holder is not slot:
                self._note_foreign(slot.fqn)
            elif not slot.called:
                mend = " Only module(...) is compiled; module.forward(...) and a __call__ without super() are not."
                self.report.add_fallback(slot.fqn, reason="it was not called through module(...)", mend=mend)

    def _compile(self, fqn: str) -> None:
        """Put the compiled forward of one target in its place, or note why it has none."""
        slot = self._slot(fqn)
        if slot.holder is not None and slot.holder is not slot:
            self._note_foreign(fqn)
            return
        shared = self._forwards.share(slot.module)
        if shared is None:
            reason = f"the forward of {type(slot.module).__name__} is no Python function that can be compiled"
            self.report.add_fallback(fqn, reason=reason, mend=" (It may be compiled, scripted or disabled already.)")
            return
        slot.compile_with(shared)
        slot.settle()

    def _note_foreign(self, fqn: str) -> None:
        mend = " Drop one of the two: m.compile(), or this target in compile.scope."
        self.report.add_fallback(fqn, reason="it is compiled by the user's own module.compile()", mend=mend)

    def _slot(self, fqn: str) -> Slot:
        """The slot for the module named `fqn`, made when first asked for."""
        found = self._slots.get(fqn)
        if found is None:
            modules = dict(self._module().named_modules())
            if fqn not in modules:
                raise UsageError(f"there is no module {fqn!r}.{did_you_mean(fqn, modules)}")
            found = self._slots[fqn] = Slot(modules[fqn], fqn=fqn, report=self.report)
        return found

    def _module(self) -> nn.Module:
        module = self._root()
        if module is None:
            raise UsageError("the module to compile no longer exists")
        return module
