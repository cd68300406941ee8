"""Compiling through the engine: from config alone or at run time, exact to switch off, equal to eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sheer
import sheer.testing
from sheer.errors import ConfigError, UsageError
from tests.engine.models import batches, odd
from tests.engine.oracle import Case, adamw, assert_same_model, engine_run, plain_run, start, values

NAMED = ["blocks.*", "head"]
EAGER = {"compile": {"enabled": True, "backend": "aot_eager"}}


def counting(graphs: list[int]):
    def backend(graph, _inputs):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    return backend


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("stage", "scope"),
    # What stays of a module by every stage and scope: test_identity.py. Stage 3 by every scope: test_stage3.py.
    [(0, "auto"), (0, NAMED), (1, "module"), (2, "auto"), (2, "module"), (2, ["Block"]), (3, "auto"), (3, NAMED)],
    ids=str,
)
def test_compiled_training_equals_plain(stage: int, scope) -> None:
    case = Case(stage=stage, world=2, rank=sheer.testing.rank(), accumulation=2, clip=0.5)
    model, reference = odd(), odd()
    data = batches(2, size=case.global_batch)
    engine = start(model, case, compile={**EAGER["compile"], "scope": scope})
    ours = engine_run(engine, case, data)
    torch.testing.assert_close(
        torch.tensor(ours),
        torch.tensor(plain_run(reference, case, data, optimizer=adamw(reference))),
        rtol=1e-5,
        atol=1e-6,
    )
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, rtol=1e-5, atol=1e-6)
    assert engine.is_compiled
    assert engine.compile_report.graphs >= 1
    engine.destroy()


def test_from_config_alone_by_any_users_section() -> None:
    section = {"enabled": True, "backend": "inductor", "kwargs": {"disable": True}}
    engine = start(odd(), Case(), compile=section)
    assert not engine.is_compiled
    assert engine.torch_compile_kwargs == {"disable": True}
    engine(batches(1, size=2)[0])
    assert engine.compile_report.graphs == 0


def test_on_off_and_over_at_run_time() -> None:
    model = odd()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    engine = start(model, Case())
    tokens = batches(1, size=2)[0]
    expected = engine(tokens)
    graphs: list[int] = []
    engine.compile(backend=counting(graphs), compile_kwargs={"dynamic": False})
    assert engine.is_compiled
    assert engine.torch_compile_kwargs == {"dynamic": False}
    torch.testing.assert_close(engine(tokens), expected)
    assert len(graphs) == 1  # one for all equal blocks
    other: list[int] = []
    engine.set_backend(counting(other))
    torch.testing.assert_close(engine(tokens), expected)
    assert (len(graphs), len(other)) == (1, 1)
    engine.set_torch_compile_kwargs({"disable": True})
    assert not engine.is_compiled
    engine.set_torch_compile_kwargs({})
    engine.compile()
    assert engine.is_compiled
    engine.uncompile()
    assert not engine.is_compiled
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert module._compiled_call_impl is None


def test_a_compiler_function_takes_the_place_of_torch_compile() -> None:
    engine = start(odd(), Case())
    seen = []

    def compiler_fn(forward):
        seen.append(forward)
        return forward

    engine.compile(compiler_fn=compiler_fn)
    tokens = batches(1, size=2)[0]
    torch.testing.assert_close(engine(tokens), odd()(tokens))
    assert seen
    count = len(seen)
    engine.set_compiler_fn(None)
    engine.set_compiler_fn(compiler_fn)
    engine(tokens)
    assert len(seen) > count
    with pytest.raises(ConfigError, match="must be callable"):
        engine.set_compiler_fn("torch.compile")


@pytest.mark.world_size(2)
def test_a_mistake_on_one_rank_is_one_on_all() -> None:
    engine = start(odd(), Case(world=2))
    wrong = sheer.testing.rank() == 1
    with pytest.raises(ConfigError, match="failed on 1 of 2 ranks"):
        engine.compile(backend="inducktor" if wrong else "eager")
    assert not engine.is_compiled
    with pytest.raises(ConfigError, match="dynamc"):
        engine.compile(backend="eager", compile_kwargs={"dynamc": True})
    assert (engine.is_compiled, engine.torch_compile_kwargs, engine._compiler.backend) == (False, {}, "inductor")
    engine.compile(backend="eager")
    with pytest.raises(ConfigError, match="failed on 1 of 2 ranks"):
        engine.set_torch_compile_kwargs({"dynamc": True} if wrong else {"dynamic": True})
    assert (engine.is_compiled, engine.torch_compile_kwargs) == (True, {})
    with pytest.raises(UsageError, match="schedule and compiled_autograd_enabled are DeepSpeed's"):
        engine.compile(schedule=[1])


def test_freezing_and_loading_go_on_compiled(tmp_path) -> None:
    case = Case()
    model, reference = odd(), odd()
    engine = start(model, case, **EAGER)
    optimizer = adamw(reference)
    data = batches(4, size=case.global_batch)
    engine_run(engine, case, data[:1])
    plain_run(reference, case, data[:1], optimizer=optimizer)
    for module in (model, reference):
        module.blocks[1].requires_grad_(False)
    engine_run(engine, case, data[1:2])
    plain_run(reference, case, data[1:2], optimizer=optimizer)
    for module in (model, reference):
        module.blocks[1].requires_grad_(True)
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    engine_run(engine, case, data[2:])
    plain_run(reference, case, data[2:], optimizer=optimizer)
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_state_goes_between_compiled_and_plain(stage: int, world_size: int) -> None:
    case = Case(stage=stage, world=world_size, rank=sheer.testing.rank())
    compiled, plain = odd(seed=1), odd(seed=2)
    engine = start(compiled, case, **EAGER)
    engine_run(engine, case, batches(1, size=case.global_batch))
    assert list(compiled.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(values(compiled))
    tokens = batches(1, size=2, seed=9)[0]
    torch.testing.assert_close(engine(tokens), plain(tokens))
    engine.load_module_state_dict(odd(seed=3).state_dict())
    torch.testing.assert_close(engine(tokens), odd(seed=3)(tokens))


def test_copies_of_a_compiled_module_are_plain_and_their_own() -> None:
    model = odd()
    engine = start(model, Case(), **EAGER)
    tokens = batches(1, size=2)[0]
    engine(tokens)
    twin = copy.deepcopy(engine.module)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert all(module._compiled_call_impl is None for module in twin.modules())
    assert twin(tokens) != engine(tokens)
    engine.module = engine.module
    assert engine.module is model
    assert type(engine.module) is type(model)
    assert isinstance(engine.module, nn.Module)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
def test_a_backend_that_does_not_work_leaves_the_model_as_it_was(precision) -> None:
    model = odd()
    before = {name: (value.dtype, value.clone(), value.data_ptr()) for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match="dynamc"):
        start(model, Case(), compile={"enabled": True, "backend": "eager", "kwargs": {"dynamc": 1}}, **precision)
    options = {"options": {"no_such_option": 1}}
    with pytest.raises(ConfigError, match="no_such_option"):
        start(model, Case(), compile={"enabled": True, "kwargs": options}, **precision)
    for name, value in model.state_dict().items():
        dtype, values, address = before[name]
        assert (value.dtype, value.data_ptr()) == (dtype, address)
        assert torch.equal(value, values)


def test_an_ema_copy_is_a_plain_module() -> None:
    model = odd()
    engine = start(model, Case(), **EAGER)
    ema = torch.optim.swa_utils.AveragedModel(engine.module, avg_fn=lambda old, new, _count: (old + new) / 2)
    start_values = {name: p.detach().clone() for name, p in ema.module.named_parameters()}
    engine_run(engine, Case(), batches(1, size=2))
    ema.update_parameters(engine.module)  # the first call copies
    engine_run(engine, Case(), batches(1, size=2))
    before = {name: p.detach().clone() for name, p in ema.module.named_parameters()}
    ema.update_parameters(engine.module)
    assert type(ema.module) is type(model)
    for name, param in model.named_parameters():
        averaged = dict(ema.module.named_parameters())[name]
        torch.testing.assert_close(averaged, (before[name] + param) / 2)
        assert averaged.numel() == 0 or averaged.data_ptr() != param.data_ptr()
    assert any(not torch.equal(before[name], start_values[name]) for name in before)


def test_the_report_is_printed_once_when_something_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    model = odd()
    engine = start(model, Case(), **EAGER)
    engine_run(engine, Case(), batches(2, size=2))
    assert "compile: on" not in caplog.text
    model.blocks[0].up.register_forward_hook(lambda *_: None)  # no hook inside a graph can fire
    engine_run(engine, Case(), batches(3, size=2))
    assert caplog.text.count("compile: on") == 1
    assert "runs eagerly" in caplog.text


def test_a_forward_that_calls_the_module_is_the_users_own_recursion() -> None:
    """Compiling adds none: an override that calls the module for one more, bounded, round works as it does in eager."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

        def forward(self, x, rounds: int = 0):
            for block in self.blocks:
                x = block(x)
            return self(x, rounds - 1) if rounds else x.sum()

    torch.manual_seed(0)
    model = Twice()
    x = torch.randn(2, 3)
    expected = copy.deepcopy(model)(x, 3)
    for scope in ("auto", "module"):
        engine = start(model, Case(), compile={**EAGER["compile"], "scope": scope})
        torch.testing.assert_close(engine(x, 3), expected)
        engine.destroy()
