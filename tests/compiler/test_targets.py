from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from sheer.compiler import find_blocks
from sheer.compiler.targets import choose
from sheer.errors import ConfigError
from tests.compiler.models import Block, Net


def test_blocks_are_the_equal_children_of_a_list() -> None:
    assert find_blocks(Net(depth=3)) == ("blocks.0", "blocks.1", "blocks.2")


@pytest.mark.parametrize(
    "module",
    [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), Net(depth=1), nn.ReLU()],
    ids=["layer", "two-linears", "one-block", "no-parameters"],
)
def test_without_repetition_the_whole_module_is_the_target(module: nn.Module) -> None:
    assert find_blocks(module) == ("",)


def test_a_sequential_root_and_a_native_block_count() -> None:
    encoder = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
    assert find_blocks(
        nn.Sequential(nn.Linear(4, 4), encoder, nn.TransformerEncoderLayer(4, 2, 4, batch_first=True))
    ) == (
        "1",
        "2",
    )


def test_the_outermost_repetition_wins_and_stages_are_looked_into() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            return x

    assert find_blocks(nn.ModuleList([Stage(), Stage()])) == ("0", "1")
    towers = nn.Module()
    towers.layer1 = nn.Sequential(Block(), Block())
    towers.layer2 = nn.Sequential(Block(), nn.ReLU(), Block())
    assert find_blocks(towers) == ("layer1.0", "layer1.1", "layer2.0", "layer2.2")
    assert find_blocks(nn.Sequential(towers.layer1, towers.layer2)) == ("0.0", "0.1", "1.0", "1.2")


def test_a_shared_block_is_named_once() -> None:
    block = Block()
    assert find_blocks(nn.Sequential(OrderedDict(a=block, b=Block(), c=block))) == ("a", "b")
    assert find_blocks(nn.ModuleList([block, block])) == ("0",)
    assert find_blocks(nn.ModuleDict({"one": nn.Sequential(block, Block()), "two": nn.Sequential(block, Block())})) == (
        "one.0",
        "one.1",
        "two.1",
    )


def test_scope_names_classes_and_globs_outermost_only() -> None:
    net = Net(depth=2)
    assert choose(net, scope="module") == ("",)
    assert choose(net, scope=["Block"]) == ("blocks.0", "blocks.1")
    assert choose(net, scope=["blocks.*"]) == ("blocks.0", "blocks.1")
    assert choose(net, scope=["Block", "blocks.1.up", "head"]) == ("blocks.0", "blocks.1", "head")
    assert choose(net, scope=["Net", "Block"]) == ("",)


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ("autoo", ["'autoo'", "'auto'", "'module'"]),
        ([], ["empty"]),
        (["Blok"], ["'Blok'", "Did you mean 'Block'"]),
        (["blocks"], ["'blocks'", "ModuleList", "blocks.*"]),
    ],
)
def test_a_wrong_scope_says_what_is_allowed(scope: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        choose(Net(depth=2), scope=scope)
    for word in words:
        assert word in str(error.value)
