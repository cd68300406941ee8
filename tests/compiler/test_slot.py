"""The module stays what it is: identity, copies, patches, other people's traces, and what is left afterwards."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sheer.compiler import Inputs
from sheer.compiler.slot import KEY, Eager
from sheer.errors import UsageError
from tests.compiler.models import Block, assert_same, compiled, net, run, tokens, twin


def _facts(module: nn.Module) -> tuple[object, ...]:
    return (
        type(module),
        repr(module),
        list(module.state_dict()),
        [name for name, _ in module.named_modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in module.modules()],
        [sorted(set(m.__dict__) - {KEY}) for m in module.modules()],
        [m.forward.__func__ for m in module.modules() if not isinstance(m, nn.ModuleList)],
    )


def test_the_module_looks_the_same_before_during_and_after() -> None:
    model = net()
    before, dicts = _facts(model), [dict(m.__dict__) for m in model.modules()]
    dynamo = torch._dynamo.config.save_config()
    compiler = compiled(model)
    run(model, tokens())
    assert _facts(model) == before
    model.zero_grad()
    compiler.disable()
    assert _facts(model) == before
    assert [list(m.__dict__) for m in model.modules()] == [list(d) for d in dicts]
    assert torch._dynamo.config.save_config() == dynamo
    assert compiler.enabled is compiler.report.active is False


def test_what_stood_in_the_slot_before_is_put_back() -> None:
    model = net()
    model.blocks[0].__dict__[KEY] = None
    compiler = compiled(model)
    compiler.disable()
    assert model.blocks[0].__dict__[KEY] is None
    assert KEY not in model.blocks[1].__dict__


def test_nothing_compiled_is_left_after_disable_and_enabling_again_works() -> None:
    model = net()
    wanted = run(twin(model), tokens())
    compiler = compiled(model)
    run(model, tokens())
    codes = [copied._code for shared in compiler._forwards._shared.values() for copied in shared._copies.values()]
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    assert [len(entries(code)) for code in codes] == [1]
    compiler.disable()
    assert [len(entries(code)) for code in codes] == [0]
    assert_same(run(model, tokens()), wanted)
    assert compiler.report.graphs == 1
    compiler.enable()
    compiler.enable()
    assert_same(run(model, tokens()), wanted)
    assert compiler.report.graphs == 2


@pytest.mark.parametrize("disable", [True, False])
def test_nothing_keeps_the_module_alive(disable: bool) -> None:
    model = net()
    compiler = compiled(model)
    run(model, tokens())
    refs = [weakref.ref(m) for m in (model, model.blocks[0], model.blocks[0].up)]
    if disable:
        compiler.disable()
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    compiler.disable()
    with pytest.raises(UsageError, match="no longer exists"):
        compiler.enable()


def _saved(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


class OwnState(Block):
    """Keeps everything of its `__dict__`, where `nn.Module` drops the slot."""

    def __getstate__(self) -> dict[str, object]:
        return dict(self.__dict__)


@pytest.mark.parametrize(
    "make",
    [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), _saved],
    ids=["deep", "copy", "pickle", "save"],
)
def test_copies_are_plain_modules(make) -> None:
    model = net()
    compiled(model)
    run(model, tokens())
    clone = make(model.blocks[0])
    assert KEY not in clone.__dict__
    assert type(clone) is Block
    x = torch.ones(2, 8)
    assert torch.equal(clone(x), clone.forward(x))


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deep", "pickle"])
def test_copies_follow_their_own_weights_even_with_their_own_getstate(make) -> None:
    model = nn.Sequential(OwnState(), OwnState())
    compiled(model)
    x = torch.ones(2, 8)
    before = model(x).detach()
    clone = make(model)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.zero_()
    assert torch.equal(clone(x), x)
    assert torch.equal(model(x), before)
    assert clone[0].__dict__.get(KEY) is None


def test_patches_of_forward_are_respected_on_instance_and_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    compiler = compiled(model)
    first, x = model.blocks[0], torch.ones(2, 8)
    wanted = first(x)
    first.forward = lambda value: value * 3
    assert torch.equal(first(x), x * 3)
    del first.forward
    assert torch.equal(first(x), wanted)
    with monkeypatch.context() as patch:
        patch.setattr(Block, "forward", lambda self, value: value * 5)
        assert torch.equal(first(x), x * 5)
    assert torch.equal(first(x), wanted)
    assert [f.reason for f in compiler.report.fallbacks] == [Eager.PATCHED.value]


def test_a_wrapper_set_as_forward_may_call_the_old_one() -> None:
    model = net()
    compiled(model)
    block, x = model.blocks[0], torch.ones(2, 8)
    old, wanted = block.forward, block(x)
    block.forward = lambda value: old(value) + 1
    assert torch.equal(block(x), wanted + 1)


def test_forward_patched_before_is_what_gets_compiled() -> None:
    model = net()

    def doubled(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).sum(-1)

    for block in model.blocks:
        block.forward = doubled.__get__(block)
    compiler = compiled(model)
    x = torch.ones(2, 8)
    assert torch.equal(model.blocks[0](x), doubled(model.blocks[0], x))
    assert compiler.report.graphs == 1
    model.blocks[1].forward = doubled.__get__(model.blocks[0])
    assert torch.equal(model.blocks[1](x), doubled(model.blocks[0], x))


class Child(Block):
    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.gain = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, scale=0.5) * self.gain


def test_super_forward_works() -> None:
    model = nn.Sequential(Child(), Child())
    compiler = compiled(model)
    x = torch.randn(3, 8, requires_grad=True)  # as the second block's input: one kind of input, one graph
    assert_same(run(model, x), run(twin(model), x))
    assert compiler.report.graphs == 1


def test_inside_an_outer_compile_the_block_is_part_of_that_graph() -> None:
    model = net()
    compiler = compiled(model)
    outer = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(run(model, tokens(), call=outer), run(twin(model), tokens()))
    assert compiler.report.graphs == 0
    assert_same(run(model, tokens()), run(twin(model), tokens()))
    assert compiler.report.graphs == 1


def test_functional_call_and_transforms_use_the_weights_they_are_given() -> None:
    model = net()
    compiler = compiled(model)
    block, x = model.blocks[0], torch.randn(3, 8)
    block(x)
    weights = {name: torch.randn_like(p) for name, p in block.named_parameters()}
    plain = twin(block)
    wanted = torch.func.functional_call(plain, weights, (x,))
    assert torch.equal(torch.func.functional_call(block, weights, (x,)), wanted)
    loss = lambda w, m: torch.func.functional_call(m, w, (x,)).sum()  # noqa: E731
    for name, grad in torch.func.grad(loss)(weights, plain).items():
        assert torch.equal(torch.func.grad(loss)(weights, block)[name], grad)
    assert torch.equal(torch.vmap(block)(x), torch.vmap(plain)(x))
    assert [f.reason for f in compiler.report.fallbacks] == [Eager.TRANSFORM.value]
    assert torch.equal(block(x), plain(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_export_fx_and_jit_trace_see_the_plain_module() -> None:
    model = nn.Sequential(Block(), Block())
    compiled(model)
    x = torch.randn(3, 8)
    model(x)
    wanted = twin(model)(x)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), wanted)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), wanted)
    assert torch.equal(torch.jit.trace(model, (x,))(x), wanted)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_at_the_first_call_does_not_switch_compiling_off_for_good() -> None:
    model = net()
    compiler = compiled(model)
    same, x = twin(model), tokens()
    with Counting() as counter:
        model(x)
    with Counting() as plain:
        same(x)
    assert counter.seen == plain.seen
    assert len(plain.seen) > 10
    assert compiler.report.graphs == 0
    model(tokens())
    assert compiler.report.graphs == 1
    assert {f.reason for f in compiler.report.fallbacks} == {Eager.DISPATCH_MODE.value}
    assert len(compiler._teller.said) == 1


def test_flops_are_counted_as_without() -> None:
    model = net()
    compiled(model)
    flops = []
    for module in (model, twin(model)):
        with FlopCounterMode(display=False) as counter:
            module(tokens())
        flops.append(counter.get_flop_counts())
    assert flops[0] == flops[1]
    assert "Net.blocks.0.up" in flops[0]


def test_replaced_inner_modules_are_seen() -> None:
    model = net()
    compiled(model)
    run(model, tokens())
    model.blocks[1].up = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
    assert_same(run(model, tokens()), run(twin(model), tokens()))


class Doubling:
    """A gate that doubles what goes in, negates what comes out, and counts."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def enter(self, inputs: Inputs) -> Inputs:
        self.events.append("enter")
        return Inputs((inputs.args[0] * 2, *inputs.args[1:]), inputs.kwargs)

    def leave(self, output: torch.Tensor) -> torch.Tensor:
        self.events.append("leave")
        return -output

    def abort(self) -> None:
        self.events.append("abort")


@pytest.mark.parametrize("on", [True, False])
def test_a_gate_works_around_users_hooks_compiled_or_not(on: bool) -> None:
    model = net()
    compiler = compiled(model)
    if not on:
        compiler.disable()
    block, gate, x = model.blocks[0], Doubling(), torch.ones(2, 8)
    block.register_forward_pre_hook(lambda module, args: gate.events.append("pre"))
    block.register_forward_hook(lambda module, args, output: gate.events.append("post"))
    wanted = -twin(block)(x * 2)
    gate.events.clear()
    compiler.set_gate("blocks.0", gate)
    assert torch.equal(block(x), wanted)
    assert gate.events == ["enter", "pre", "post", "leave"]
    gate.events.clear()
    with pytest.raises(RuntimeError, match="shape"):
        block(torch.ones(2, 7))
    assert gate.events == ["enter", "pre", "abort"]
    assert compiler.report.graphs == (1 if on else 0)
    compiler.disable()
    assert KEY in block.__dict__
    compiler.set_gate("blocks.0", None)
    assert KEY not in block.__dict__


def test_a_gate_inside_a_target_or_on_nothing_is_refused() -> None:
    model = net()
    compiler = compiled(model)
    with pytest.raises(UsageError, match=r"blocks\.0\.up.*inside the compile target 'blocks\.0'"):
        compiler.set_gate("blocks.0.up", Doubling())
    with pytest.raises(UsageError, match=r"Did you mean 'blocks\.1'"):
        compiler.set_gate("blocks1", Doubling())


def test_a_users_own_compile_is_noticed_before_and_after() -> None:
    model = net()
    model.blocks[0].compile(backend="aot_eager")
    theirs = model.blocks[0].__dict__[KEY]
    compiler = compiled(model)
    model.blocks[1].compile(backend="aot_eager")
    model(tokens())
    compiler.review()
    assert [f.target for f in compiler.report.fallbacks] == ["blocks.0", "blocks.1"]
    assert all("module.compile()" in f.reason for f in compiler.report.fallbacks)
    assert len(compiler._teller.said) == 1
    compiler.disable()
    assert model.blocks[0].__dict__[KEY] is theirs
    assert KEY in model.blocks[1].__dict__
    assert KEY not in model.blocks[2].__dict__
