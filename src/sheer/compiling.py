"""The engine's verbs for compiling: switching it on, off and over while it runs."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sheer.errors import UsageError

if TYPE_CHECKING:
    from sheer.comm import Mesh
    from sheer.compiler import Compiler, Report


class CompileVerbs(ABC):
    """Compiles `engine.module` in place. A base of `Engine` only.

    Only calls of a target through `module(...)` are compiled, never `module.forward(...)`. All ranks make the same
    calls; where one fails, all raise and nothing has changed.
    """

    _mesh: Mesh
    _compiler: Compiler

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: Mapping[str, object] | None = None,
        compiler_fn: Callable[..., Any] | None = None,
        schedule: object = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the targets that `compile.scope` names, from their next call on. What is not given stays as it is.

        Args:
            backend: a `torch.compile` backend's name, an import path "pkg.mod.fn", or a callable.
            compile_kwargs: further arguments of `torch.compile`.
            compiler_fn: takes the place of `torch.compile`: `compiler_fn(forward) -> callable`.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise UsageError(
                "engine.compile: schedule and compiled_autograd_enabled are DeepSpeed's and not supported here; leave "
                "them out"
            )

        self._change("engine.compile", backend=backend, kwargs=compile_kwargs, compiler_fn=compiler_fn)
        self._compiler.enable()

    def _change(self, doing: str, **asked: Any) -> None:
        """All ranks find that it works before any changes."""
        settings = self._mesh.world.together(lambda: self._compiler.checked(**asked), doing=doing)
        self._compiler.apply(settings)

    def uncompile(self) -> None:
        """Run everything eagerly again; nothing of compiling is left on the module or in dynamo."""
        self._compiler.disable()

    def set_backend(self, backend: str | Callable[..., Any]) -> None:
        """Compile with another backend from the next call on."""
        self._change("engine.set_backend", backend=backend)

    def set_torch_compile_kwargs(self, kwargs: Mapping[str, object]) -> None:
        """Compile with other arguments of `torch.compile` from the next call; `{"disable": True}` compiles nothing."""
        self._change("engine.set_torch_compile_kwargs", kwargs=kwargs)

    def set_compiler_fn(self, compiler_fn: Callable[..., Any] | None) -> None:
        """Compile with `compiler_fn(forward)` in the place of `torch.compile`; None returns to that."""
        if compiler_fn is None:
            self._compiler.set_compiler_fn(None)
        else:
            self._change("engine.set_compiler_fn", compiler_fn=compiler_fn)

    @property
    def is_compiled(self) -> bool:
        """Whether compiling is switched on."""
        return self._compiler.enabled

    @property
    def torch_compile_kwargs(self) -> dict[str, object]:
        """A copy of the further arguments of `torch.compile`."""
        return self._compiler.kwargs

    @property
    def compile_report(self) -> Report:
        """What was compiled, and what was not and why; `.html(path)` writes it as a page."""
        return self._compiler.report
