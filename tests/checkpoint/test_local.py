"""Folders of nodes: each gets what its ranks hold, a load brings the rest, and a save that fails loses nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sheer.checkpoint import Axis, Index, Shard, at_hand, load, open_checkpoint, open_together, save
from sheer.errors import CheckpointError
from tests.checkpoint import faults
from tests.checkpoint.ranks import cut, errors_on_ranks, on_ranks, whole

VALUE = torch.arange(30_000.0)


def save_on(roots: Sequence[Path], tag: str, value: torch.Tensor = VALUE) -> Callable[[Axis], Path]:
    """Each rank its part, to its folder."""
    pieces = cut("param", "w", value, cuts=[value.numel() * rank // len(roots) for rank in range(1, len(roots))])

    def body(axis: Axis) -> Path:
        held = [pieces[axis.rank], *([whole("buffer", "b", torch.ones(3))] if axis.rank == 0 else [])]
        return save(roots[axis.rank], tag, shards=held, facts={}, state={}, rng={}, axis=axis, local=True)

    return body


def load_on(roots: Sequence[Path], tag: str | None = None) -> Callable[[Axis], list[torch.Tensor]]:
    """Each rank all of it."""

    def body(axis: Axis) -> list[torch.Tensor]:
        index: Index = open_together(roots[axis.rank], tag, axis=axis, local=True)
        numel = index.content.tensors["param"]["w"].numel
        wanted = [whole("param", "w", torch.zeros(numel)), whole("buffer", "b", torch.zeros(3))]
        load(index, wanted=wanted, axis=axis, fetch=at_hand)
        return [shard.data for shard in wanted]

    return body


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """The folders of three ranks, the first two of which are on one node."""
    return [tmp_path / "one", tmp_path / "one", tmp_path / "two"]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_folder_gets_what_its_ranks_hold_and_a_load_brings_the_rest(nodes: list[Path], tmp_path: Path) -> None:
    assert on_ranks(3, save_on(nodes, "t")) == [node / "t" for node in nodes]
    closing = ["index.json", "rng.safetensors", "state.json"]
    assert files(nodes[0] / "t") == sorted([*closing, "rank00000.safetensors", "rank00001.safetensors"])
    assert files(nodes[2] / "t") == sorted([*closing, "rank00002.safetensors"])
    for node in nodes:
        assert (node / "latest").read_text() == "t\n"
    assert (nodes[0] / "t" / "index.json").read_bytes() == (nodes[2] / "t" / "index.json").read_bytes()
    for roots in (nodes, [*nodes, tmp_path / "new", tmp_path / "new"], nodes[::-1], [node / "t" for node in nodes]):
        for value, buffer in on_ranks(len(roots), load_on(roots)):
            assert torch.equal(value, VALUE)
            assert torch.equal(buffer, torch.ones(3))
    assert [name for node in {*nodes, tmp_path / "new"} for name in files(node) if name.startswith(".tmp")] == []


def test_what_a_rank_has_is_not_brought(nodes: list[Path]) -> None:
    on_ranks(3, save_on(nodes, "t"))
    part = VALUE.numel() // 3

    def body(axis: Axis) -> tuple[float, list[str]]:
        index = open_together(nodes[axis.rank], axis=axis, local=True)
        wanted = [Shard("param", "w", tuple(VALUE.shape), part * axis.rank, torch.zeros(part))]
        with at_hand(index, [], axis=axis) as there:
            brought = files(there.fetched)
        load(index, wanted=wanted, axis=axis, fetch=at_hand, kinds={"param"})
        return wanted[0].data[1].item(), brought

    assert on_ranks(3, body) == [(part * rank + 1.0, []) for rank in range(3)]


def test_copied_together_they_are_a_checkpoint_like_any_other(nodes: list[Path]) -> None:
    on_ranks(3, save_on(nodes, "t"))
    with pytest.raises(CheckpointError, match=r"rank00002\.safetensors: the file is missing .*another node's folder"):
        open_checkpoint(nodes[0])
    os.rename(nodes[2] / "t" / "rank00002.safetensors", nodes[0] / "t" / "rank00002.safetensors")
    assert open_checkpoint(nodes[0]).tag == "t"


def _lose(node: Path) -> None:
    (node / "t" / "rank00002.safetensors").unlink()


def _another(node: Path) -> None:
    on_ranks(1, save_on([node], "t"))


def _flip(node: Path) -> None:
    file = node / "t" / "rank00002.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_lose, r"rank00002\.safetensors: the file is in no node's folder"),
        (_another, r"rank 2: .*two/t is another checkpoint than rank 0's of the same name"),
        (_flip, r"rank00002\.safetensors: param 'w': bytes .* do not match their checksum"),
    ],
)
def test_what_is_not_whole_is_an_error_on_all(nodes: list[Path], harm: Callable[[Path], None], words: str) -> None:
    on_ranks(3, save_on(nodes, "t"))
    harm(nodes[2])
    for error in errors_on_ranks(3, load_on(nodes)):
        with pytest.raises(CheckpointError, match=words):
            raise error or AssertionError


@pytest.mark.parametrize("killed", [0, 2])
def test_killed_between_the_folders_the_tag_is_whole_still(nodes: list[Path], killed: int) -> None:
    """The node of rank `killed` has not taken over the version that replaces a tag, or all others have not."""
    on_ranks(3, save_on(nodes, "t", VALUE + 1))
    before = nodes[killed].parent / "before"
    shutil.copytree(nodes[killed] / "t", before)
    other = nodes[2 - killed]
    shutil.copytree(other / "t", other / ".aside")
    on_ranks(3, save_on(nodes, "t", VALUE))
    os.rename(nodes[killed] / "t", nodes[killed] / ".tmp-t-0badcafe")
    os.rename(before, nodes[killed] / "t")
    os.rename(other / ".aside", other / ".old-t")
    expected = VALUE + 1 if killed == 0 else VALUE
    assert all(torch.equal(value, expected) for value, _ in on_ranks(3, load_on(nodes)))


def test_a_save_of_others_to_one_of_the_folders_is_refused_on_all(nodes: list[Path]) -> None:
    on_ranks(3, save_on(nodes, "t"))
    with (nodes[2] / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for error in errors_on_ranks(3, save_on(nodes, "u")):
            with pytest.raises(CheckpointError, match=r"another save to .*two is in progress"):
                raise error or AssertionError
    assert {name for node in nodes for name in files(node)} == {".lock", "latest", "t"}


@pytest.mark.parametrize("tag", ["new", "old"])
def test_refused_at_any_call_what_latest_names_is_whole_everywhere(tmp_path: Path, tag: str, monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no power will fail; it takes most of the time
    old, new = VALUE[:2000].clone(), VALUE[:2000] + 1
    refused = 0
    for at in range(10_000):
        roots = [tmp_path / f"{at}" / node for node in ("one", "two")]
        on_ranks(2, save_on(roots, "old", old))

        def strike(name: str, half: Callable[[], Any]) -> Any:
            raise OSError(errno.EIO, "Input/output error", "a path")

        with faults.tripwire(at, strike) as wire:
            errors = errors_on_ranks(2, save_on(roots, tag, new))
        if not wire.struck:
            break
        refused += any(errors)
        assert all(errors) or not any(errors), errors
        found = [value for value, _ in on_ranks(2, load_on(roots))]
        assert any(all(torch.equal(value, each) for value in found) for each in (old, new))
        on_ranks(2, save_on(roots, "after", new))
        assert all(torch.equal(value, new) for value, _ in on_ranks(2, load_on(roots)))
    assert refused > 40
