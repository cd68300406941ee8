"""A list of layers, cut in every way: all stages one after the other are the plain model."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sheer
from sheer import LayerSpec, PipelineModule, TiedLayerSpec
from sheer.errors import UsageError

WIDTH = 4


class Scale(nn.Module):
    """A parameter of an unusual shape, and one deeper."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x * self.scale)


def transposed(layer, x):
    return x @ layer.weight.t()


def double(x):
    return x * 2


def make(kind):
    """A fresh description of one layer."""
    return {
        "linear": lambda: LayerSpec(nn.Linear, WIDTH, WIDTH),
        "scale": lambda: LayerSpec(Scale),
        "norm": lambda: LayerSpec(nn.LayerNorm, WIDTH),
        "function": lambda: double,
        "tied": lambda: TiedLayerSpec("a", nn.Linear, WIDTH, WIDTH),
        "turned": lambda: TiedLayerSpec("a", nn.Linear, WIDTH, WIDTH, forward_fn=transposed),
        "deep": lambda: TiedLayerSpec("b", Scale, tied_weight_attr=["inner.weight", "scale"]),
    }[kind]()


KINDS = ["linear", "scale", "norm", "function", "tied", "turned", "deep"]


def stages_of(layers, stages, **keywords):
    """All stages of one model, as its ranks would build them."""
    built = []
    for stage in range(stages):
        torch.manual_seed(7)
        built.append(PipelineModule(layers, num_stages=stages, stage=stage, **keywords))
    return built


def run(stages, x):
    """All virtual stages in order of execution."""
    seen = {stage: itertools.count() for stage in range(len(stages))}
    for stage in stages[0].placement:
        x = stages[stage].run(x, chunk=next(seen[stage]))
    return x


def whole_names(stages):
    """Every parameter of every stage under its name in the whole model."""
    found = {}
    for module in stages:
        for name, parameter in module.named_parameters():
            found.setdefault(module.canonical.get(name, name), []).append(parameter)
    return found


@settings(max_examples=50)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=7),
    stages=st.integers(1, 4),
    chunks=st.integers(1, 2),
    placement=st.sampled_from(["loop", "v"]),
    method=st.sampled_from(["uniform", "parameters"]),
)
def test_every_split_is_the_plain_model(kinds, stages, chunks, placement, method):
    layers = [make(kind) for kind in kinds]
    whole = stages_of(layers, 1)[0]
    split = stages_of(layers, stages, chunks=chunks, placement=placement, partition_method=method)
    x = torch.randn(3, WIDTH, requires_grad=True)
    assert torch.equal(run(split, x), whole(x))
    run(split, x).sum().backward()
    whole(x).sum().backward()
    names = whole_names(split)
    assert set(names) == {name for name, _ in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        holders = names[name]
        assert len(holders) == len(split[0].tied.get(name, (0,)))
        assert all(torch.equal(holder, parameter) for holder in holders), name
        if parameter.grad is not None:
            torch.testing.assert_close(sum(h.grad for h in holders if h.grad is not None), parameter.grad)
    assert set().union(*(module.state_dict() for module in split)) == set(whole.state_dict())
    assert len({module.parts for module in split}) == 1


def test_names_and_function_are_those_of_nn_sequential():
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8))
    specs = [LayerSpec(nn.Linear, 4, 8), torch.relu, LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.LayerNorm, 8)]
    split = stages_of(specs, 2, boundaries=[0, 1, 4])
    assert [list(module.state_dict()) for module in split] == [
        ["0.weight", "0.bias"],
        ["2.weight", "2.bias", "3.weight", "3.bias"],
    ]
    for module in split:
        module.load_state_dict({k: v for k, v in plain.state_dict().items() if k in module.state_dict()})
    x = torch.randn(2, 4)
    assert torch.equal(run(split, x), plain(x))


def test_a_sequential_keeps_its_modules_and_their_names():
    plain = nn.Sequential()
    plain.add_module("first", nn.Linear(4, 4))
    plain.add_module("last", nn.Linear(4, 4))
    module = PipelineModule(plain, num_stages=2, stage=1, partition_method="uniform")
    assert module.last is plain.last
    assert list(module.state_dict()) == ["last.weight", "last.bias"]


def test_a_stage_is_the_module_it_is():
    layers = [make("linear"), double, make("tied"), make("tied")]
    module = PipelineModule(layers, num_stages=2, stage=1, boundaries=[0, 1, 4])
    assert isinstance(module, sheer.PipelineModule)
    assert module.num_pipeline_stages() == 2
    assert module.partitions() == [0, 1, 4]
    assert [module.stage_owner(i) for i in range(4)] == [0, 1, 1, 1]
    module.extra = 3
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is PipelineModule
        assert other.extra == 3
        assert torch.equal(other.run(torch.ones(1, WIDTH)), module.run(torch.ones(1, WIDTH)))
        assert other.get_parameter("2.weight") is other.get_parameter("3.weight")
        assert other.get_parameter("2.weight") is not module.get_parameter("2.weight")
    assert "layers 1 .. 3 of 4" in repr(module)
    assert module.half().get_parameter("2.weight").dtype == torch.float16


def test_hooks_and_replaced_layers_are_seen():
    module = PipelineModule([make("linear"), make("linear")], num_stages=1, stage=0)
    calls = []
    module.register_forward_hook(lambda *_: calls.append("whole"))
    module.get_submodule("0").register_forward_hook(lambda *_: calls.append("0"))
    x = torch.ones(1, WIDTH)
    module.run(x)
    module(x)
    assert calls == ["0", "whole"] * 2
    module.add_module("1", nn.Identity())
    assert torch.equal(module.run(x), module.get_submodule("0")(x))


def test_one_of_several_stages_does_not_run_by_itself():
    module = PipelineModule([double, double], num_stages=2, stage=0)
    with pytest.raises(UsageError, match=r"stage 0 of 2.*train_batch.*eval_batch"):
        module(torch.ones(1))


def test_an_empty_stage_passes_on():
    split = stages_of([make("linear")], 3)
    assert [len(list(module.parameters())) for module in split].count(0) == 2
    x = torch.ones(1, WIDTH)
    assert torch.equal(run(split, x), stages_of([make("linear")], 1)[0](x))
