"""Which parameters are gathered together."""

from __future__ import annotations

import torch
from torch import nn

from sheer.zero import find_units, large_layers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])
        self.head = nn.Linear(4, 5, bias=False)
        self.gain = nn.Parameter(torch.ones(()))


def test_blocks_and_the_rest() -> None:
    units = find_units(Net(), ["blocks.0", "blocks.1"])
    assert units.order == ("", "blocks.0", "blocks.1")
    assert units.unit_of["blocks.1.0.weight"] == "blocks.1"
    assert {name for name, unit in units.unit_of.items() if not unit} == {"embed.weight", "head.weight", "gain"}
    assert units.gates == {
        "": ("",),
        "embed": ("",),
        "blocks.0": ("blocks.0",),
        "blocks.1": ("blocks.1",),
        "head": ("",),
    }


def test_an_inner_block_is_its_own_and_the_outer_one_keeps_the_rest() -> None:
    units = find_units(Net(), ["blocks.0", "blocks.0.1", "blocks.1"])
    assert units.order == ("", "blocks.0", "blocks.0.1", "blocks.1")
    assert units.unit_of["blocks.0.0.weight"] == "blocks.0"
    assert units.unit_of["blocks.0.1.weight"] == "blocks.0.1"


def test_tied_parameters_belong_to_what_encloses_all_their_places() -> None:
    net = Net()
    net.blocks[1][0].weight = net.blocks[0][0].weight
    units = find_units(net, ["blocks.0", "blocks.1"])
    assert units.unit_of["blocks.0.0.weight"] == units.unit_of["blocks.1.0.weight"] == ""
    assert units.gates["blocks.1"] == ("", "blocks.1")
    inside = Net()
    inside.blocks[0][1].weight = inside.blocks[0][0].weight
    assert find_units(inside, ["blocks.0", "blocks.0.0", "blocks.0.1"]).unit_of["blocks.0.1.weight"] == "blocks.0"


def test_one_block_at_two_places_is_one_unit() -> None:
    net = Net()
    net.blocks[1] = net.blocks[0]
    units = find_units(net, ["blocks.0", "blocks.1"])
    assert units.order == ("", "blocks.0")
    assert units.unit_of["blocks.1.0.weight"] == "blocks.0"


def test_no_blocks_is_one_unit_with_a_gate_at_every_owner() -> None:
    units = find_units(Net(), [])
    assert units.order == ("",)
    assert set(units.gates) == {"", "embed", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "head"}


def test_large_layers_are_those_that_a_sequential_calls_and_no_block_has() -> None:
    class Own(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x) @ self[1].weight

    net = nn.Module()
    net.embed = nn.Embedding(1000, 100)
    net.blocks = nn.ModuleList([nn.Sequential(nn.Linear(400, 400)) for _ in range(2)])
    net.own = Own(nn.Linear(400, 400), nn.Linear(400, 400))
    net.more = nn.Sequential(nn.Linear(400, 400), nn.Linear(9, 9), nn.Sequential(nn.ReLU(), nn.Linear(400, 400)))
    net.again = nn.Sequential(net.more[0], net.embed)
    assert large_layers(net, beside=["blocks.0", "blocks.1"]) == ("more.0", "more.2.1", "again.0", "again.1")
    assert large_layers(net, beside=[""])[:2] == ("blocks.0.0", "blocks.1.0")
    assert large_layers(nn.Sequential(nn.Linear(400, 400)), beside=[""]) == ("0",)
    assert large_layers(nn.Linear(400, 400), beside=[""]) == ()
