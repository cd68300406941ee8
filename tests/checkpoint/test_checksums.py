"""Both kinds of checksum, checkpoints of older versions, and the second read of a load."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sheer.checkpoint import Axis, checksum, load, load_full, open_checkpoint, read_rng, read_state, reader, save
from sheer.checkpoint.reader import Reader, Request
from sheer.errors import CheckpointError, TornLoadError
from tests.checkpoint.ranks import Solo, cut, errors_on_ranks, on_ranks, same, whole

KINDS = [checksum.CRC32, checksum.XXH3]
VALUE = torch.arange(700_000.0)
"""Several blocks, the last of them not full."""


def save_as(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch, *, value: torch.Tensor = VALUE) -> None:
    monkeypatch.setattr(checksum, "preferred", lambda: kind)
    pieces = cut("param", "w", value, cuts=[5, 400_001])
    on_ranks(2, lambda axis: save(root, "t", shards=pieces[axis.rank :: 2], facts={}, state={}, rng={}, axis=axis))


@pytest.mark.parametrize("kind", KINDS)
def test_either_kind_is_named_verified_and_loaded(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_as(kind, tmp_path, monkeypatch)
    assert open_checkpoint(tmp_path).content.checksum == kind
    assert same(load_full(tmp_path)["w"], VALUE)
    for file in sorted((tmp_path / "t").glob("rank*")):
        written = file.read_bytes()
        for at in (len(written) - 1, len(written) // 2, 500):
            file.write_bytes(written[:at] + bytes([written[at] ^ 0x80]) + written[at + 1 :])
            with pytest.raises(CheckpointError, match=rf"{file.name}: param 'w': bytes \d+ to \d+ do not match"):
                load_full(tmp_path)
        file.write_bytes(written)


@pytest.mark.parametrize("version", ["version1", "version2"])
def test_a_checkpoint_of_an_older_version_loads(version: str) -> None:
    path = Path(__file__).parent / "golden" / version
    index, weight = open_checkpoint(path), torch.arange(120.0).view(10, 12)
    full = load_full(path)
    assert full["head"] is full["blocks.0.w"]
    assert same(full["blocks.0.w"], weight)
    assert same(full["mask"], torch.arange(70) % 3 == 0)
    assert same(full["half"], torch.arange(64.0).bfloat16())
    assert same(load_full(path, kinds=("optim.exp_avg",))["blocks.0.w"], weight * 2)
    assert same(load_full(path, kinds=("optim.step",))["blocks.0.w"], torch.tensor(3.0))
    assert read_state(index) == {"n": 5, "pair": (1, 2)}
    assert same((read_rng(index, 1) or {})["cpu"], torch.arange(5, dtype=torch.uint8))


# --- the second read --------------------------------------------------------------------------------------------------


def between_reads(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do `act` once all has been verified and before the first tensor in use is filled."""
    real = Reader.fill

    def fill(self: Reader, requests: Any) -> int:
        wanted = list(requests)
        if wanted:
            act()
        return real(self, wanted)

    monkeypatch.setattr(Reader, "fill", fill)


def replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_as(checksum.CRC32, root, monkeypatch, value=-VALUE)


def test_a_load_takes_what_it_verified_though_the_checkpoint_is_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_as(checksum.CRC32, tmp_path, monkeypatch)
    between_reads(monkeypatch, lambda: replaced(tmp_path, monkeypatch))
    wanted = whole("param", "w", torch.zeros_like(VALUE))
    load(open_checkpoint(tmp_path), wanted=[wanted], axis=Solo())
    assert same(wanted.data, VALUE)
    monkeypatch.undo()
    assert same(load_full(tmp_path)["w"], -VALUE)


def test_a_disk_that_fails_after_all_was_verified_is_a_torn_load_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_as(checksum.CRC32, tmp_path, monkeypatch)

    def flip() -> None:
        for file in (tmp_path / "t").glob("rank00001*"):
            with file.open("r+b") as opened:  # the same file, changed in place
                opened.seek(-1, os.SEEK_END)
                opened.write(b"\xff")

    between_reads(monkeypatch, flip)
    # Rank 1 wants the part that rank 1 saved; rank 0 reads another file and finds nothing wrong.
    pieces = cut("param", "w", torch.zeros_like(VALUE), cuts=[5, 400_001])

    def body(axis: Axis) -> None:
        load(open_checkpoint(tmp_path), wanted=pieces[axis.rank :: 2], axis=axis)

    for error in errors_on_ranks(2, body):
        with pytest.raises(TornLoadError, match=r"second read.*rank 1: .*rank00001.*(?s:.*)Load a checkpoint before"):
            raise error or AssertionError


def test_many_files_are_read_with_few_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.arange(7000.0)
    pieces = cut("param", "w", value, cuts=range(1000, 7000, 1000))
    on_ranks(7, lambda axis: save(tmp_path, "t", shards=[pieces[axis.rank]], facts={}, state={}, rng={}, axis=axis))
    monkeypatch.setattr(reader, "_MOST_OPEN", 2)
    out, before = torch.zeros(7000), len(os.listdir("/proc/self/fd"))
    with Reader(open_checkpoint(tmp_path)) as opened:
        key = next(key for key, _ in open_checkpoint(tmp_path).entries())
        opened.check([Request(key, 0, out)])
        assert not out.any()
        opened.fill([Request(key, 0, out)])
        assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert len(os.listdir("/proc/self/fd")) == before
    assert same(out, value)
