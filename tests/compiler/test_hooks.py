"""Every hook fires as in eager: which, in what order, with what, and what it changes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sheer.compiler.slot import Eager
from tests.compiler.models import Block, assert_same, compiled, net, run, tokens, twin

Log = list[Any]


def _seen(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return round(float(values.detach().double().abs().sum()), 9)
    if isinstance(values, tuple):
        return tuple(map(_seen, values))
    return values


def _forward_pre(module: nn.Module, log: Log, name: str, change: bool) -> Any:
    def hook(module: nn.Module, args: Any) -> Any:
        log.append((name, _seen(args)))
        return (args[0] * 1.5,) if change else None

    return module.register_forward_pre_hook(hook, prepend=change)


def _forward_pre_kwargs(module: nn.Module, log: Log, name: str, change: bool) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        log.append((name, _seen(args), sorted(kwargs)))
        return ((args[0] + 0.5,), kwargs) if change else None

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _forward(module: nn.Module, log: Log, name: str, change: bool) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        log.append((name, _seen(args), _seen(output)))
        return output * 2 if change else None

    return module.register_forward_hook(hook, prepend=change, always_call=change)


def _forward_kwargs(module: nn.Module, log: Log, name: str, change: bool) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        log.append((name, _seen(args), sorted(kwargs), _seen(output)))
        return output - 1 if change else None

    return module.register_forward_hook(hook, with_kwargs=True)


def _backward_pre(module: nn.Module, log: Log, name: str, change: bool) -> Any:
    def hook(module: nn.Module, grad_output: Any) -> Any:
        log.append((name, _seen(grad_output)))
        return tuple(g * 2 for g in grad_output) if change else None

    return module.register_full_backward_pre_hook(hook)


def _backward(module: nn.Module, log: Log, name: str, change: bool) -> Any:
    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        log.append((name, _seen(grad_input), _seen(grad_output)))
        return tuple(None if g is None else g * 0.5 for g in grad_input) if change else None

    return module.register_full_backward_hook(hook)


def _backward_old(module: nn.Module, log: Log, name: str, change: bool) -> Any:
    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        log.append((name, _seen(grad_output)))

    return module.register_backward_hook(hook)


def _tensor_in_forward(module: nn.Module, log: Log, name: str, change: bool) -> Any:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: log.append((name, _seen(grad))))

    return module.register_forward_hook(hook)


KINDS: list[Callable[..., Any]] = [
    _forward_pre,
    _forward_pre_kwargs,
    _forward,
    _forward_kwargs,
    _backward_pre,
    _backward,
    _tensor_in_forward,
]


def _scenario(seed: int, model: nn.Module) -> tuple[Log, list[Any]]:
    """Add and remove hooks at random between steps; what they saw, and every step's result."""
    choose = random.Random(seed)
    log: Log = []
    runs, handles = [], []
    names = ["blocks.0", "blocks.1", "blocks.1", "blocks.2", "blocks.1.up", "blocks.2.drop", "", "head"]
    old_hooks_on = "blocks.0" if choose.random() < 0.3 else None
    for step in range(4):
        for number in range(choose.randrange(3)):
            name, kind = choose.choice(names), choose.choice(KINDS)
            if old_hooks_on == name:
                kind = _backward_old
            elif kind in (_backward, _backward_pre) and name in ("", "blocks.2.drop"):
                kind = _forward
            change = name != "" and choose.random() < 0.5  # the tokens that go into the root are no floats
            label = f"{name}:{kind.__name__}:{step}.{number}"
            handles.append(kind(model.get_submodule(name), log, label, change))
        if handles and choose.random() < 0.3:
            handles.pop(choose.randrange(len(handles))).remove()
        runs.append(run(model, tokens(seed=step)))
        log.append("step")
    return log, runs


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_random_hooks_fire_as_in_eager(seed: int) -> None:
    model = net(seed=seed)
    plain = twin(model)
    compiled(model, backend="eager" if seed % 4 else "aot_eager")
    if seed % 3 == 0:
        run(model, tokens())  # hooks come after the first compiled call
    log, runs = _scenario(seed, model)
    wanted_log, wanted_runs = _scenario(seed, plain)
    assert log == wanted_log
    for found, wanted in zip(runs, wanted_runs, strict=True):
        assert_same(found, wanted)


def test_hooks_on_a_target_leave_it_compiled() -> None:
    model = net()
    plain = twin(model)
    compiler = compiled(model)
    for kind, change in itertools.product(KINDS, (True, False)):
        logs: list[Log] = [[], []]
        for module, log in zip((model, plain), logs, strict=True):
            handle = kind(module.blocks[1], log, "hook", change)
            log.append(run(module, tokens()).output.tolist())
            handle.remove()
        assert logs[0] == logs[1], (kind.__name__, change)
        assert len(logs[0]) == 2, (kind.__name__, change)
    assert compiler.report.graphs == 1
    assert compiler.report.fallbacks == []


def test_a_late_hook_inside_a_target_fires_and_is_said_once() -> None:
    model = net()
    compiler = compiled(model)
    run(model, tokens())
    log: Log = []
    handles = [_forward(block.up, log, "up", True) for block in model.blocks]
    found = run(model, tokens())
    assert len(log) == 3
    plain = twin(model)
    assert_same(found, run(plain, tokens()))
    run(model, tokens())
    assert [(f.target, f.reason) for f in compiler.report.fallbacks] == [
        (f"blocks.{i}", Eager.INNER_HOOK.value) for i in range(3)
    ]
    assert len(compiler._teller.said) == 1
    for handle in handles:
        handle.remove()
    before = len(log)
    run(model, tokens())
    assert len(log) == before
    assert compiler.report.graphs == 1


def test_a_pre_hook_that_hooks_an_inner_module_is_in_time() -> None:
    model = net()
    compiled(model)
    log: Log = []
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda module, args: _forward(module.up, log, "inner", False) and None)
    model(tokens())
    assert [entry[0] for entry in log] == ["inner"]


def test_hook_dicts_replaced_wholesale_are_seen() -> None:
    model = net()
    compiled(model)
    model(tokens())
    log: Log = []
    other = nn.Linear(1, 1)
    other.register_forward_hook(lambda module, args, output: log.append("fired"))
    model.blocks[0].up._forward_hooks = other._forward_hooks
    model(tokens())
    assert log == ["fired"]


def test_hooks_on_every_module_fire_for_the_inner_ones_too() -> None:
    model = net()
    compiler = compiled(model)
    model(tokens())
    counts = []
    for module in (model, twin(model)):
        names: list[str] = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda m, args, output, names=names: names.append(type(m).__name__)
        )
        try:
            module(tokens())
        finally:
            handle.remove()
        counts.append(names)
    assert counts[0] == counts[1]
    assert len(counts[0]) == 3 + 3 * 5
    assert {f.reason for f in compiler.report.fallbacks} == {Eager.GLOBAL_HOOK.value}


class Failing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if x.shape[0] == 3:
            raise KeyError("three")
        return y


@pytest.mark.parametrize("on", [True, False])
def test_an_exception_in_forward_runs_the_hooks_that_are_always_called(on: bool) -> None:
    model = nn.Sequential(Failing(), Failing())
    compiler = compiled(model)
    if not on:
        compiler.disable()
    log: Log = []
    model[0].register_forward_hook(lambda m, args, output: log.append(("always", output is None)), always_call=True)
    model[0].register_forward_hook(lambda m, args, output: log.append("usual"))
    with pytest.raises(KeyError, match="three"):
        model(torch.ones(3, 8))
    assert log == [("always", True)]
    model(torch.ones(2, 8))
    assert log == [("always", True), ("always", False), "usual"]


def test_a_raising_hook_that_is_always_called_is_only_warned_about() -> None:
    model = nn.Sequential(Failing(), Failing())
    compiled(model)

    def raising(module: nn.Module, args: Any, output: Any) -> None:
        raise ValueError("in the hook")

    model[0].register_forward_hook(raising, always_call=True)
    with pytest.warns(UserWarning, match="in the hook"), pytest.raises(KeyError, match="three"):
        model(torch.ones(3, 8))


def test_a_wrong_pre_hook_is_the_same_error_as_in_eager() -> None:
    model = net()
    compiled(model)
    model.blocks[0].register_forward_pre_hook(lambda module, args, kwargs: args, with_kwargs=True)
    with pytest.raises(RuntimeError, match="new_args, new_kwargs"):
        model(tokens())
