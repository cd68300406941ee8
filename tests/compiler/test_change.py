"""Changing the compiler while it runs: backend, arguments, a compiler function, the modules themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sheer.compiler.slot import KEY
from sheer.errors import CompileError, ConfigError
from tests.compiler.models import Block, assert_same, compiled, net, run, tokens, twin


class Backend:
    """Counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph_module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph_module.forward


def test_another_backend_compiles_from_the_next_call_on() -> None:
    model, first, second = net(), Backend(), Backend()
    compiler = compiled(model, backend=first)
    wanted = run(twin(model), tokens())
    assert_same(run(model, tokens()), wanted)
    compiler.set_backend(second)
    assert compiler.backend is second
    for _ in range(2):
        assert_same(run(model, tokens()), wanted)
    assert (first.graphs, second.graphs) == (1, 1)
    assert compiler.report.graphs == 2


@pytest.mark.parametrize("on", [True, False])
def test_what_is_set_while_off_is_used_when_switched_on(on: bool) -> None:
    model, backend = net(), Backend()
    compiler = compiled(model)
    if not on:
        compiler.disable()
    compiler.set_backend(backend)
    assert compiler.enabled is on
    run(model, tokens())
    assert backend.graphs == on
    compiler.enable()
    run(model, tokens())
    assert backend.graphs == 1


def test_kwargs_can_be_changed_and_disable_switches_off() -> None:
    model = net()
    compiler = compiled(model, kwargs={"dynamic": False})
    run(model, tokens())
    given = {"dynamic": True}
    compiler.set_kwargs(given)
    assert compiler.kwargs == given
    for batch in (6, 3, 7):
        run(model, tokens(batch))
    assert compiler.report.graphs == 2
    compiler.set_kwargs({"disable": True})
    assert not compiler.enabled
    assert all(KEY not in block.__dict__ for block in model.blocks)
    assert_same(run(model, tokens()), run(twin(model), tokens()))
    assert compiler.report.graphs == 2


def test_what_is_wrong_changes_nothing() -> None:
    model, backend = net(), Backend()
    compiler = compiled(model, backend=backend)
    broken = torch._inductor.config.patch({"cpp.cxx": (None, "/nonexistent/g++")})
    for change, error in (
        (lambda: compiler.set_backend("inductr"), ConfigError),
        (lambda: compiler.set_kwargs({"dynamc": True}), ConfigError),
        (lambda: compiler.set_compiler_fn(3), ConfigError),
        (lambda: compiler.set_backend("inductor"), CompileError),
    ):
        with broken, pytest.raises(error):
            change()
    assert compiler.enabled
    run(model, tokens())
    assert backend.graphs == 1


def test_a_compiler_function_takes_the_place_of_torch_compile() -> None:
    model, seen = net(), []

    def compiler_fn(forward: Callable[..., Any]) -> Callable[..., Any]:
        seen.append(forward)
        return torch.compile(forward, backend="eager", dynamic=False)

    compiler = compiled(model)
    compiler.set_compiler_fn(compiler_fn)
    assert_same(run(model, tokens()), run(twin(model), tokens()))
    assert len(seen) == 1
    assert seen[0].__code__ is not Block.forward.__code__
    assert seen[0].__name__ == "forward"
    assert compiler.report.graphs == 1
    compiler.set_compiler_fn(None)
    run(model, tokens())
    assert len(seen) == 1
    compiler.set_compiler_fn(lambda forward: None)
    with pytest.raises(CompileError, match="cannot be called"):
        model(tokens())


def test_a_replaced_target_is_said_and_compiled_when_switched_on_anew() -> None:
    model = net()
    compiler = compiled(model)
    run(model, tokens())
    model.blocks[1] = Block()
    assert_same(run(model, tokens()), run(twin(model), tokens()))
    compiler.review()
    (found,) = compiler.report.fallbacks
    assert found.target == "blocks.1"
    assert "another module has taken its place" in found.reason
    assert "engine.uncompile()" in compiler._teller.said[-1]
    compiler.disable()
    compiler.enable()
    assert KEY in model.blocks[1].__dict__
    assert_same(run(model, tokens()), run(twin(model), tokens()))


def test_targets_are_chosen_anew_when_switched_on() -> None:
    model = net(depth=3)
    compiler = compiled(model)
    compiler.disable()
    model.blocks.append(Block())
    compiler.enable()
    assert compiler.targets == compiler.report.targets == tuple(f"blocks.{i}" for i in range(4))
    assert [len(group.targets) for group in compiler.report.groups] == [4]


@pytest.mark.parametrize("scope", ["auto", "module", ["Block"]], ids=["auto", "module", "list"])
def test_which_blocks_are_compiled_is_told(scope: Any) -> None:
    compiler = compiled(net(depth=12), scope=scope)
    told = " ".join(compiler._teller.told)
    wanted = {"auto": "12 x Block (blocks.0 ... blocks.11)", "module": "Net is compiled whole"}
    assert wanted[scope] in told if isinstance(scope, str) else not told
    assert compiler._teller.said == []


class Lora(nn.Module):
    """A low-rank adapter around a linear layer."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def _adapt(model: nn.Module) -> None:
    for block in model.blocks:
        block.up, block.down = Lora(block.up), Lora(block.down)


@pytest.mark.parametrize("when", ["before", "enabled", "called"])
def test_adapters_added_before_and_after(when: str) -> None:
    model = net()
    if when == "before":
        _adapt(model)
    compiler = compiled(model)
    if when == "called":
        run(model, tokens())
    if when != "before":
        _adapt(model)
    for _ in range(2):
        assert_same(run(model, tokens()), run(twin(model), tokens()))
    compiler.review()
    assert compiler.report.graphs == (2 if when == "called" else 1)
    assert compiler.report.fallbacks == []
