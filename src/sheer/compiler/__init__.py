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
from collections.abc import Callable, Mapping

import torch
from torch import nn

from sheer.compiler.backends import Backend, CompilerFn, Settings, check_backend, check_kwargs, resolve
from sheer.compiler.forwards import Forwards, Shared
from sheer.compiler.outside import Outside, group_of, survey
from sheer.compiler.page import render
from sheer.compiler.records import Break, Fallback, Graph, Group, Place, Recompile
from sheer.compiler.report import AUDIT_EVENT, Report
from sheer.compiler.slot import Gate, Inputs, Slot
from sheer.compiler.targets import Scope, choose, compiled_by_user, find_blocks, modules_by_name, pick
from sheer.errors import ConfigError, UsageError, did_you_mean
from sheer.observe import Teller

__all__ = [
    "AUDIT_EVENT",
    "Break",
    "Compiler",
    "Fallback",
    "Gate",
    "Graph",
    "Group",
    "Inputs",
    "Place",
    "Recompile",
    "Report",
    "check_backend",
    "compiled_by_user",
    "find_blocks",
    "pick",
    "render",
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
        self._root = root = weakref.ref(module)
        self._settings = Settings(resolve(backend), dict(kwargs))
        self._scope = scope
        self._works: Settings | None = None  # what has been found to work: trying again would compile again
        self._teller = teller
        self._slots: dict[str, Slot] = {}
        self.report = Report(choose(module, scope=scope), teller=teller, survey=_surveyor(root))
        self._forwards = Forwards(self._settings, report=self.report)

    @property
    def enabled(self) -> bool:
        """Whether compiling is switched on."""
        return self.report.active

    @property
    def targets(self) -> tuple[str, ...]:
        """FQNs of the modules that are compiled; chosen anew whenever compiling is switched on."""
        return self.report.targets

    @property
    def backend(self) -> Backend:
        """What compiles: the name of a torch backend, or a callable."""
        return self._settings.backend

    @property
    def kwargs(self) -> dict[str, object]:
        """A copy of the further arguments of `torch.compile`."""
        return dict(self._settings.kwargs)

    def check(self, *, device: torch.device | None = None) -> None:
        """Find out whether the backend works, on `device` (by default the module's), before anything is changed.

        Raises:
            ConfigError, CompileError: it does not.
        """
        self._check(self._settings, device=device)

    def enable(self) -> None:
        """Compile the targets from their next call on. Nothing happens where it is on already or `kwargs` disable it.

        Raises:
            CompileError: the backend does not work on this machine.
        """
        if self.enabled:
            return
        if self._settings.disabled:
            self._teller.info("compile: kwargs.disable is true, so nothing is compiled")
            return
        module = self._module()
        self._check(self._settings)
        targets = choose(module, scope=self._scope)
        for fqn, slot in self._slots.items():
            if slot.gate is not None:
                _refuse_inside(fqn, targets)
        self.report.targets = targets
        self.report.active = True
        self.report.groups = self._groups({fqn: self._compile(fqn) for fqn in self.targets})
        self._say_targets(module)

    def disable(self) -> None:
        """Run everything eagerly again; nothing compiled is left on the module or in dynamo."""
        self.report.settle()
        self.report.active = False
        for slot in self._slots.values():
            slot.compile_with(None)
            slot.settle()
        self._slots = {fqn: slot for fqn, slot in self._slots.items() if slot.gate is not None}
        self._forwards.forget()

    def set_backend(self, backend: Backend) -> None:
        """Compile with another backend, from the next call on; a `compiler_fn` set before is dropped.

        Raises:
            ConfigError, CompileError: it does not exist or work here; nothing has changed then.
        """
        self._change(self._settings._replace(backend=resolve(backend), compiler_fn=None))

    def set_kwargs(self, kwargs: Mapping[str, object]) -> None:
        """Compile with other arguments of `torch.compile`, from the next call on; `{"disable": True}` switches off.

        Raises:
            ConfigError: an argument that `torch.compile` does not take; nothing has changed then.
        """
        check_kwargs(kwargs)
        self._change(self._settings._replace(kwargs=dict(kwargs)))

    def set_compiler_fn(self, compiler_fn: CompilerFn | None) -> None:
        """Compile with `compiler_fn(forward) -> callable` in the place of `torch.compile`; None: with that again.

        `forward` is a private copy of a target's forward and takes the module as its first argument. The backend and
        its arguments are then `compiler_fn`'s own business. Graphs are counted as far as dynamo makes them.
        """
        self._change(self._settings._replace(compiler_fn=None if compiler_fn is None else _callable(compiler_fn)))

    def _change(self, settings: Settings) -> None:
        """Use `settings` from now on: where compiling is on, what was compiled is dropped and made anew when called."""
        was_on = self.enabled
        if was_on:
            self._check(settings)
            self.disable()
        self._settings = settings
        self._forwards = Forwards(settings, report=self.report)
        if was_on:
            self.enable()

    def checked(
        self,
        *,
        backend: Backend | None = None,
        kwargs: Mapping[str, object] | None = None,
        compiler_fn: CompilerFn | None = None,
    ) -> Settings:
        """The present settings with what is given, found to work; for `apply`. Changes nothing.

        Raises:
            ConfigError, CompileError: something does not exist or work here.
        """
        settings = self._settings
        if backend is not None:
            settings = settings._replace(backend=resolve(backend), compiler_fn=None)
        if kwargs is not None:
            check_kwargs(kwargs)
            settings = settings._replace(kwargs=dict(kwargs))
        if compiler_fn is not None:
            settings = settings._replace(compiler_fn=_callable(compiler_fn))
        self._check(settings)
        return settings

    def apply(self, settings: Settings) -> None:
        """Use what `checked` gave, from the next call on."""
        self._change(settings)

    def _check(self, settings: Settings, *, device: torch.device | None = None) -> None:
        if settings.compiler_fn is None and not settings.disabled and settings is not self._works:
            device = device or next((p.device for p in self._module().parameters()), None)
            check_backend(settings.backend, kwargs=settings.kwargs, device=device)
            self._works = settings

    def _say_targets(self, module: nn.Module) -> None:
        if self.targets == ("",):
            why = "" if self._scope == "module" else ", which has no repeated blocks,"
            self._teller.info(
                f"compile: {type(module).__name__}{why} is compiled whole; its gradients are all ready at the end of"
                " its backward, so reducing them does not overlap it"
            )
        elif self._scope == "auto":
            found = "; ".join(f"{len(g.targets)} x {g.kind} ({_ends(g.targets)})" for g in self.report.groups)
            self._teller.info(f"compile: the repeated blocks of {type(module).__name__} are compiled: {found}")

    def set_gate(self, fqn: str, gate: Gate | None) -> None:
        """Run `gate` around every call of the module named `fqn`, compiled or not; None takes it away.

        A larger piece that the user traces with `torch.compile` takes the module's forward in, past the gate.

        Raises:
            UsageError: no such module, or it lies inside a compiled target, whose trace the gate's work would enter.
        """
        if gate is not None and self.enabled:
            _refuse_inside(fqn, self.targets)
        slot = self._slot(fqn)
        slot.gate = gate
        slot.settle()

    def keep_gates(self) -> None:
        """Stand around what the user has compiled by `module.compile()` since a gate was set. Cheap; before a call.

        Raises:
            UsageError: a gate on a module inside it would be passed by.
        """
        for fqn, slot in self._slots.items():
            if slot.gate is None:
                continue
            if slot.holder is not slot:
                slot.settle()
            if slot.users is not None:
                self._refuse_around(fqn)

    def _refuse_around(self, fqn: str) -> None:
        inner = next((other for other, slot in self._slots.items() if slot.gate and _is_inside(other, fqn)), None)
        if inner is not None:
            raise UsageError(
                f"module {fqn!r} was compiled by its own compile(), which takes {inner!r} in: parameters of "
                f"{inner!r} are gathered around its calls (stage 3), which nothing can do inside a compiled call. "
                "Use `compile` in the config, which compiles block by block, or compile the blocks themselves"
            )

    def review(self) -> None:
        """Note what cannot be seen from inside a call: a target that the user compiled or replaced, or never called.

        Cheap; for the end of a step.
        """
        if not self.enabled:
            return
        self.report.settle()
        module = self._module()
        for slot in self._slots.values():
            if slot.forward is None:
                continue
            if _named(module, slot.fqn) is not slot.alive:
                self._note(slot.fqn, "another module has taken its place since compiling was switched on", _ENABLE_ANEW)
            elif slot.holder is not slot:
                self._note(slot.fqn, "it is compiled by the user's own module.compile()", _DROP_ONE)
            elif not slot.called:
                self._note(slot.fqn, "it was not called through module(...)", _ONLY_CALLS)

    def _compile(self, fqn: str) -> Shared | None:
        """Put the compiled forward of one target in its place and give it, or note why it has none."""
        slot = self._slot(fqn)
        if (slot.holder is not None and slot.holder is not slot) or slot.users is not None:
            self._note(fqn, "it is compiled by the user's own module.compile()", _DROP_ONE)
            return None
        shared = self._forwards.share(slot.module)
        if shared is None:
            reason = f"the forward of {type(slot.module).__name__} is no Python function that can be compiled"
            self._note(fqn, reason, "It may be compiled, scripted or disabled already.")
            return None
        slot.compile_with(shared)
        slot.settle()
        return shared

    def _note(self, fqn: str, reason: str, mend: str) -> None:
        self.report.add_fallback(fqn, reason=reason, mend=mend)

    def _groups(self, compiled: Mapping[str, Shared | None]) -> tuple[Group, ...]:
        """The targets by what they share; those that cannot be compiled by their class."""
        names: dict[Shared | type[nn.Module], list[str]] = {}
        for fqn, shared in compiled.items():
            names.setdefault(shared or type(self._slot(fqn).module), []).append(fqn)
        return tuple(group_of(self._slot(fqns[0]).module, tuple(fqns)) for fqns in names.values())

    def _slot(self, fqn: str) -> Slot:
        """The slot for the module named `fqn`, made when first asked for."""
        found = self._slots.get(fqn)
        if found is None:
            modules = modules_by_name(self._module())
            if fqn not in modules:
                raise UsageError(f"there is no module {fqn!r}.{did_you_mean(fqn, modules)}")
            found = self._slots[fqn] = Slot(modules[fqn], fqn=fqn, report=self.report)
        return found

    def _module(self) -> nn.Module:
        module = self._root()
        if module is None:
            raise UsageError("the module to compile no longer exists")
        return module


def _refuse_inside(fqn: str, targets: tuple[str, ...]) -> None:
    """A gate on `fqn` could not do its work inside the trace of a larger target."""
    outer = next((target for target in targets if _is_inside(fqn, target)), None)
    if outer is not None:
        raise UsageError(
            f"module {fqn!r} lies inside the compile target {outer!r}, so nothing can be run around its calls; name "
            f"{fqn!r} (or its class) in compile.scope instead of {outer!r}"
        )


def _is_inside(fqn: str, outer: str) -> bool:
    return fqn != outer and (not outer or fqn.startswith(outer + "."))


_ENABLE_ANEW = "Switch compiling off and on again: engine.uncompile(), engine.compile()."
_DROP_ONE = "Drop one of the two: m.compile(), or this target in compile.scope."
_ONLY_CALLS = "Only module(...) is compiled; module.forward(...) and a __call__ without super() are not."


def _surveyor(root: weakref.ref[nn.Module]) -> Callable[[tuple[str, ...]], Outside | None]:
    """What the report asks for what is outside, without holding the module."""

    def look(targets: tuple[str, ...]) -> Outside | None:
        module = root()
        return None if module is None else survey(module, targets)

    return look


def _named(module: nn.Module, fqn: str) -> nn.Module | None:
    """The module of that name now, or None."""
    found: nn.Module | None = module
    for part in fqn.split(".") if fqn else ():
        found = None if found is None else found._modules.get(part)
    return found


def _ends(targets: tuple[str, ...]) -> str:
    """The first and the last name."""
    return targets[0] if len(targets) == 1 else f"{targets[0]} ... {targets[-1]}"


def _callable(compiler_fn: CompilerFn) -> CompilerFn:
    if not callable(compiler_fn):
        raise ConfigError(f"compiler_fn is {compiler_fn!r}; it must be callable, or None for torch.compile")
    return compiler_fn
