"""Globs over names, and other names for what is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sheer.checkpoint import Key, Names, Reader, Request, open_checkpoint, save
from sheer.errors import CheckpointError
from tests.checkpoint.ranks import Solo, whole


@pytest.fixture
def root(tmp_path: Path) -> Path:
    names = ["encoder.0.weight", "encoder.0.bias", "encoder.10.weight", "embed.weight", "head.bias"]
    shards = [whole("param", name, torch.full((30,), float(at))) for at, name in enumerate(names)]
    shards += [whole("buffer", "encoder.seen", torch.ones(())), whole("optim.exp_avg", "embed.weight", torch.ones(30))]
    facts = {"ties": {"head.weight": "embed.weight"}, "frozen": ["encoder.0.bias"]}
    save(tmp_path, "t", shards=shards, facts=facts, state={}, rng={}, axis=Solo())
    return tmp_path


@pytest.mark.parametrize(
    ("rename", "stored", "here"),
    [
        ({}, "a.b", "a.b"),
        ({"a": "x"}, "a.b", "x.b"),
        ({"a": "x"}, "ab.b", "ab.b"),
        ({"a": ""}, "a.b", "b"),
        ({"": "m"}, "a.b", "m.a.b"),
        ({"": "m", "a": "x.y"}, "a.b", "x.y.b"),
        ({"a": "x", "a.b": "z"}, "a.b.c", "z.c"),
        ({"a.b": "z"}, "a.b", "z"),
    ],
)
def test_the_longest_stored_name_that_fits_is_replaced(rename: dict[str, str], stored: str, here: str) -> None:
    assert Names(rename=rename).here(stored) == here


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (Names(include=("encoder.*",)), {"encoder.0.weight", "encoder.0.bias", "encoder.10.weight", "encoder.seen"}),
        (Names(include=("encoder.*",), exclude=("*.weight", "*seen")), {"encoder.0.bias"}),
        (Names(include=("head.weight",)), {"embed.weight"}),
        (Names(exclude=("head.*", "encoder.*")), {"embed.weight"}),
        (Names(include=("body.0.*",), rename={"encoder": "body"}), {"body.0.weight", "body.0.bias"}),
    ],
)
def test_what_is_left_out_is_as_if_it_were_not_there(root: Path, names: Names, left: set[str]) -> None:
    index = names.of(open_checkpoint(root))
    assert {key.name for key, _ in index.entries()} == left
    assert index.ties == ({"head.weight": "embed.weight"} if "embed.weight" in left else {})


def test_renamed_tensors_are_read_from_where_they_are(root: Path) -> None:
    index = Names(rename={"encoder": "body", "embed.weight": "tokens", "head": "out"}).of(open_checkpoint(root))
    assert index.ties == {"out.weight": "tokens"}
    assert index.facts["frozen"] == ["body.0.bias"]
    found = torch.zeros(30)
    with Reader(index) as reader:
        reader.fill([Request(Key("param", "body.10.weight"), 0, found)])
        assert found.tolist() == [2.0] * 30
        reader.fill([Request(Key("optim.exp_avg", "tokens"), 0, found)])
    assert found.tolist() == [1.0] * 30


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (Names(rename={"encodr": "x"}), r"rename: the checkpoint has no 'encodr'\. Did you mean 'encoder'"),
        (Names(rename={"encoder.0": "encoder.10"}), "the name 'encoder.10.weight' to two tensors"),
        (
            Names(include=("encoder.*", "head.biass")),
            r"no tensor of the checkpoint matches 'head\.biass'.*'head\.bias'",
        ),
        (Names(rename={"head": "encoder.0"}), "the name 'encoder.0.weight' to 'encoder.0.weight' and 'head.weight'"),
        (Names(exclude=("haed.*",)), r"exclude: no tensor of the checkpoint or of the model matches 'haed\.\*'"),
        (Names(exclude=("*",)), "leaves nothing of the checkpoint to load"),
    ],
)
def test_what_fits_nothing_is_refused(root: Path, names: Names, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        names.of(open_checkpoint(root))
