"""Building a stage: seeds, ties, ranks, measured time, recomputation, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sheer import LayerSpec, PipelineModule, TiedLayerSpec
from sheer.errors import UsageError
from sheer.testing import rank
from tests.pipeline.test_layers import run, stages_of

built = []


class Noted(nn.Linear):
    """Counts where real weights were made."""

    def __init__(self, width):
        super().__init__(width, width)
        if not self.weight.is_meta:
            built.append(width)


def test_layers_are_built_on_their_stage_only():
    layers = [LayerSpec(Noted, width) for width in (3, 3, 3, 3)]
    built.clear()
    PipelineModule(layers, num_stages=2, stage=1)
    assert len(built) == 2


def test_generators_are_left_alone():
    torch.manual_seed(1)
    PipelineModule([LayerSpec(nn.Linear, 3, 3)] * 4, num_stages=2, stage=0, seed_layers=True)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)


def test_seeds():
    specs = [LayerSpec(nn.Linear, 3, 3) for _ in range(3)]
    torch.manual_seed(1)
    one = PipelineModule(specs, num_stages=1, stage=0)
    torch.manual_seed(2)
    two = PipelineModule(specs, num_stages=1, stage=0)
    assert not torch.equal(one.get_parameter("0.weight"), two.get_parameter("0.weight"))
    assert not torch.equal(one.get_parameter("0.weight"), one.get_parameter("1.weight"))
    seeded = PipelineModule(specs, num_stages=3, stage=2, seed_layers=True, base_seed=5)
    torch.manual_seed(7)
    assert torch.equal(seeded.get_parameter("2.weight"), nn.Linear(3, 3).weight)
    calls = []
    PipelineModule(specs, num_stages=3, stage=2, seed_layers=True, seed_fn=calls.append)
    assert calls == [1236]


def test_the_same_module_at_two_places_is_tied():
    shared = nn.Linear(3, 3)
    split = stages_of([shared, torch.relu, shared], 2, boundaries=[0, 2, 3])
    assert split[0].tied == {"0.weight": (0, 1), "0.bias": (0, 1)}
    assert split[1].canonical == {"2.weight": "0.weight", "2.bias": "0.bias"}


def test_ties_over_three_stages_twice_on_one():
    layers = [TiedLayerSpec("w", nn.Linear, 3, 3) for _ in range(4)]
    split = stages_of(layers, 3, boundaries=[0, 1, 3, 4])
    assert split[0].tied == {"0.weight": (0, 1, 2)}
    assert split[1].get_parameter("1.weight") is split[1].get_parameter("2.weight")
    assert split[1].get_parameter("1.bias") is not split[1].get_parameter("2.bias")
    assert split[1].canonical == {"1.weight": "0.weight", "2.weight": "0.weight"}
    assert torch.equal(split[2].get_parameter("3.weight"), split[0].get_parameter("0.weight"))


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_recomputing_gives_the_same_with_dropout_and_integers(interval):
    layers = [LayerSpec(nn.Embedding, 7, 4), LayerSpec(nn.Dropout, 0.5), LayerSpec(nn.Linear, 4, 4), torch.tanh]
    plain, recomputed = (stages_of(layers, 1, activation_checkpoint_interval=each)[0] for each in (0, interval))
    calls = []
    recomputed.get_submodule("2").register_forward_pre_hook(lambda *_: calls.append(1))
    for module in (plain, recomputed):
        torch.manual_seed(0)
        module.run(torch.arange(6)).sum().backward()
    assert len(calls) == 2
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    recomputed.set_checkpoint_interval(0)
    recomputed.run(torch.arange(6)).sum().backward()
    assert len(calls) == 3


def test_what_is_recomputed_and_by_what():
    calls = []

    def mine(function, *args):
        calls.append(len(args))
        return function(*args)

    layers = [LayerSpec(nn.Linear, 4, 4), lambda x: (x, x), lambda pair: pair[0] + pair[1], LayerSpec(nn.Tanh)]
    keywords = {"activation_checkpoint_interval": 1, "activation_checkpoint_func": mine}
    stages_of(layers, 1, **keywords)[0].run(torch.ones(1, 4))
    assert calls == [1]
    calls.clear()
    stages_of(layers, 1, checkpointable_layers=["Tanh", "<lambda>"], **keywords)[0].run(torch.ones(1, 4))
    assert calls == [1, 2, 1]


def test_a_loss_with_weights_lives_on_the_last_stage():
    loss = nn.CrossEntropyLoss(weight=torch.ones(4))
    layers = [LayerSpec(nn.Linear, 4, 4)] * 2
    first, last = (PipelineModule(layers, num_stages=2, stage=stage, loss_fn=loss) for stage in range(2))
    assert "loss_fn.weight" not in first.state_dict()
    assert "loss_fn.weight" in last.state_dict()
    assert first.loss_fn is last.loss_fn is loss


@pytest.mark.world_size(4)
def test_the_stage_follows_from_the_rank():
    module = PipelineModule([LayerSpec(nn.Linear, 3, 3)] * 4, num_stages=2)
    assert module.stage == rank() // 2
    assert module.topology().get_axis_comm_lists("data") == [[0, 1], [2, 3]]


@pytest.mark.world_size(2)
def test_time_is_measured_on_one_rank_for_all():
    class Slow(nn.Module):
        def forward(self, x):
            for _ in range(300):
                x = x @ torch.eye(64)
            return x

    module = PipelineModule(
        [LayerSpec(Slow), *[LayerSpec(nn.Linear, 64, 64)] * 5],
        num_stages=2, partition_method="time", sample_input=torch.randn(8, 64),
    )  # fmt: skip
    assert module.partitions() == [0, 1, 6]
    with pytest.raises(UsageError, match="give sample_input"):
        PipelineModule([LayerSpec(Slow)], num_stages=2, partition_method="time")


@pytest.mark.parametrize(
    ("layers", "keywords", "message"),
    [
        ([torch.relu], {"num_stages": None}, "say into how many stages"),
        ([torch.relu], {"stage": 2}, r"stage is 2; with num_stages=2 it is one of 0 \.\. 1"),
        ([torch.relu], {"stage": None, "num_stages": 3}, r"num_stages=3 does not divide the 1 rank\(s\).*torchrun"),
        ([torch.relu], {"chunks": 0}, "chunks is 0"),
        ([torch.relu, 3], {}, "layer 1 is 3; a layer is"),
        ([torch.relu], {"activation_checkpoint_interval": -1}, "activation_checkpoint_interval is -1"),
        (
            [TiedLayerSpec("k", nn.Linear, 3, 4), TiedLayerSpec("k", nn.Linear, 4, 3)],
            {},
            r"tied by 'k': layer 1's weight is \[3, 4\] float32, but layer 0's weight is \[4, 3\] float32",
        ),
        (
            [TiedLayerSpec("k", nn.Linear, 3, 3), TiedLayerSpec("k", nn.Linear, 3, 3, tied_weight_attr="wieght")],
            {},
            r"layer 1 has no parameter 'wieght'; it has weight, bias. Did you mean 'weight'",
        ),
        (
            [TiedLayerSpec("k", nn.Linear, 3, 3), TiedLayerSpec("k", nn.Linear, 3, 3, tied_weight_attr=["a", "b"])],
            {},
            "must name equally many",
        ),
    ],
)
def test_mistakes(layers, keywords, message):
    with pytest.raises(UsageError, match=message):
        PipelineModule(layers, **{"num_stages": 2, "stage": 0} | keywords)


def test_a_spec_needs_a_module_class():
    with pytest.raises(UsageError, match="LayerSpec takes a subclass"):
        LayerSpec(torch.relu)
    assert repr(LayerSpec(nn.Linear, 3, 4, bias=False)) == "LayerSpec(Linear, 3, 4, bias=False)"
    assert run(stages_of([LayerSpec(nn.Identity)], 2), 3) == 3
