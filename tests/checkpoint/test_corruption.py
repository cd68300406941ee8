"""Bytes other than those written are found, by file and tensor; no index is trusted; memory is bounded."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sheer.checkpoint import Index, Shard, load, load_full, open_checkpoint, read_rng, read_state, save
from sheer.checkpoint.index import VERSION
from sheer.errors import CheckpointError
from tests.checkpoint.ranks import Solo, cut, on_ranks, whole

FILES = ["index.json", "state.json", "rng.safetensors", "rank00000.safetensors", "rank00001.safetensors"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of two ranks, with pieces in files and in the index."""
    shards = [
        *cut("param", "blocks.0.w", torch.arange(300.0), cuts=[100]),
        *cut("buffer", "mask", torch.ones(200, dtype=torch.bool), cuts=[50]),
        whole("optim.step", "blocks.0.w", torch.tensor(3)),
        whole("param", "none", torch.zeros(0, 7)),
    ]
    rng = {"cpu": torch.arange(50, dtype=torch.uint8)}
    facts = {"ties": {"head": "blocks.0.w"}, "frozen": ["mask"]}
    return on_ranks(
        2,
        lambda axis: save(
            tmp_path, "t", shards=shards[axis.rank :: 2], facts=facts, state={"n": 5}, rng=rng, axis=axis
        ),
    )[0]


def read_everything(path: Path) -> Any:
    index = open_checkpoint(path)
    tensors = {kind: load_full(path, kinds=(kind,)) for kind in sorted(index.kinds)}
    return index, tensors, read_state(index), read_rng(index, 0), read_rng(index, 1)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(path: Path, name: str) -> None:
    file = path / name
    written = file.read_bytes()
    for at in range(0, len(written), 7):
        damaged = bytearray(written)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name):
            read_everything(path)
    file.write_bytes(written)
    read_everything(path)


@pytest.mark.parametrize("name", FILES)
def test_missing_cut_and_longer_files_are_found(path: Path, name: str) -> None:
    file = path / name
    written = file.read_bytes()
    for changed in (b"", written[:1], written[: len(written) // 2], written[:-1], written + b"\0"):
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match=name):
            read_everything(path)
    file.unlink()
    with pytest.raises(CheckpointError, match=name):
        read_everything(path)


def test_the_tensor_is_named(path: Path) -> None:
    file = path / "rank00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank00000.safetensors: buffer 'mask': bytes \d+ to \d+ do not match"):
        load_full(path, kinds=("buffer",))
    assert torch.equal(load_full(path, kinds=("param",))["blocks.0.w"], torch.arange(300.0)), "the rest is there"


def test_a_file_cut_after_it_was_opened_is_found(path: Path) -> None:
    index = open_checkpoint(path)
    file = path / "rank00000.safetensors"
    file.write_bytes(file.read_bytes()[:-300])
    wanted = [Shard("param", "blocks.0.w", (300,), 0, torch.zeros(300))]
    with pytest.raises(CheckpointError, match=r"rank00000.safetensors: .* ends early"):
        load(index, wanted=wanted, axis=Solo(), allow_unexpected=True)


# An index that was tampered with, its checksum made to match ----------------------------------------------------------


def content_of(path: Path) -> Any:
    return json.loads((path / "index.json").read_bytes())["content"]


def sign(path: Path, body: bytes, *, version: int = VERSION) -> None:
    head = b'{"sheer_checkpoint":%d,"crc32":"%08x","content":\n' % (version, zlib.crc32(body))
    (path / "index.json").write_bytes(head + body + b"\n}\n")


def first_piece(content: Any) -> Any:
    return content["tensors"]["param"]["blocks.0.w"]["pieces"][0]


def change(target: Callable[[Any], Any], **values: Any) -> Callable[[Any], None]:
    return lambda content: target(content).update(values)


def tensor(content: Any) -> Any:
    return content["tensors"]["param"]["blocks.0.w"]


def rename_file(name: str) -> Callable[[Any], None]:
    def apply(content: Any) -> None:
        content["files"][name] = content["files"].pop("rank00000.safetensors")
        for named in content["tensors"].values():
            for entry in named.values():
                for piece in entry["pieces"]:
                    if piece.get("file") == "rank00000.safetensors":
                        piece["file"] = name

    return apply


TAMPERED: dict[str, tuple[Callable[[Any], None], str]] = {
    "absolute path": (rename_file("/etc/passwd"), "not a name that a checkpoint's file can have"),
    "parent path": (rename_file("../t/rank00000.safetensors"), "not a name that a checkpoint's file can have"),
    "unlisted file": (change(first_piece, file="rank00007.safetensors"), "which the index does not list"),
    "missing piece": (lambda c: tensor(c)["pieces"].pop(), "are held by nobody"),
    "piece twice": (lambda c: tensor(c)["pieces"].append(tensor(c)["pieces"][0]), "are held twice"),
    "no pieces": (change(tensor, pieces=[]), "at least 1 item"),
    "overlap in the file": (lambda c: c["tensors"]["param"].update(copy=dict(tensor(c))), "bytes of rank.* held twice"),
    "outside the file": (change(first_piece, at=1 << 40), "outside the file"),
    "in the header": (change(first_piece, at=8), "outside the file"),
    "negative": (change(first_piece, at=-1), "greater than or equal to 0"),
    "absurd shape": (change(tensor, shape=[1 << 62, 1 << 62]), "more elements than a tensor can have"),
    "absurd empty shape": (change(tensor, shape=[0, 1 << 62, 1 << 62]), "more elements than a tensor can have"),
    "larger shape": (change(tensor, shape=[1 << 50]), "are held by nobody"),
    "other dtype": (change(tensor, dtype="float64"), r"has \d checksums|outside the file|bytes of rank"),
    "unknown dtype": (change(tensor, dtype="object"), "dtype 'object' is unknown"),
    "no checksums": (change(first_piece, sums=[]), "has 0 checksums"),
    "inline too": (change(first_piece, inline="00"), "an inline piece"),
    "unknown key": (change(first_piece, path="x"), "Extra inputs are not permitted"),
    "float for int": (change(first_piece, start=0.0), "valid integer"),
    "bool for int": (change(first_piece, start=False), "valid integer"),
    "unknown kind": (lambda c: c["tensors"].update(pickle=c["tensors"]["buffer"]), "its kind is not"),
    "no block": (change(lambda c: c, block=0), "greater than or equal to 4096"),
    "tie to nothing": (change(lambda c: c["facts"]["ties"], a="b"), "not among the stored"),
    "ties no mapping": (change(lambda c: c["facts"], ties=[1]), "not a mapping"),
    "no state": (lambda c: c["files"].pop("state.json"), "state.json is not listed"),
}


@pytest.mark.parametrize(("tamper", "message"), TAMPERED.values(), ids=TAMPERED)
def test_an_index_that_does_not_hold_together_is_refused(
    path: Path, tamper: Callable[[Any], None], message: str
) -> None:
    content = content_of(path)
    tamper(content)
    sign(path, json.dumps(content).encode())
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b'{"a":1,"a":1}'],
    ids=["empty", "list", "null", "cut", "not text", "deep list", "deep object", "long number", "key twice"],
)
def test_an_index_that_is_not_its_schema_is_refused(path: Path, body: bytes) -> None:
    sign(path, body)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(path)


def test_a_newer_format_is_said_to_be_newer(path: Path) -> None:
    sign(path, b'{"of": "the future"}', version=VERSION + 1)
    with pytest.raises(
        CheckpointError,
        match=rf"format version {VERSION + 1}; this Sheer reads up to {VERSION}. Load it with a newer Sheer",
    ):
        open_checkpoint(path)


def mutate(value: Any, source: random.Random) -> Any:
    """`value` with one random place of it replaced, removed or doubled."""
    if isinstance(value, dict) and value and source.random() < 0.9:
        key = source.choice(list(value))
        changed = dict(value)
        part = changed.pop(key)
        return changed if source.random() < 0.05 else {**changed, key: mutate(part, source)}
    if isinstance(value, list) and value and source.random() < 0.9:
        at = source.randrange(len(value))
        if source.random() < 0.1:
            return value[:at] + value[at + 1 :] if source.random() < 0.5 else [*value, value[at]]
        return [*value[:at], mutate(value[at], source), *value[at + 1 :]]
    if isinstance(value, int) and source.random() < 0.5:
        return value + source.choice([-1, 1, 4, -64, 1 << 31, 1 << 63, -(1 << 63), 1 << 200])
    return source.choice(
        [None, True, 0, -1, 1.5, float("nan"), "", "..", "\ud800", "float16", [], {}, [[]], {"$tuple": 1}]
    )


def test_random_changes_to_the_index_end_in_our_error_or_in_a_valid_checkpoint(path: Path) -> None:
    source = random.Random(0)
    original = content_of(path)
    refused = 0
    tracemalloc.start()
    for _ in range(400):
        sign(path, json.dumps(mutate(original, source)).encode())
        try:
            read_everything(path)
        except CheckpointError:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 200
    assert peak < 16 * 2**20, "no mutation makes a reader allocate much"


# Memory ---------------------------------------------------------------------------------------------------------------


def traced_peak(work: Callable[[], object]) -> int:
    """The most bytes that `work` had allocated at once, torch's CPU allocations (which go through numpy) included."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def large(tmp_path: Path) -> Index:
    """One tensor of 80 MB in one piece."""
    value = torch.zeros(20_000_000)
    save(tmp_path, "t", shards=[whole("param", "w", value)], facts={}, state={}, rng={}, axis=Solo())
    return open_checkpoint(tmp_path)


def test_loading_a_part_takes_a_few_chunks(large: Index) -> None:
    part = Shard("param", "w", (20_000_000,), 7_000_001, torch.zeros(1_000_000))
    peak = traced_peak(lambda: load(large, wanted=[part], axis=Solo()))
    assert peak < 5 * 8 * 2**20


def test_loading_all_into_tensors_in_use_takes_a_few_blocks(large: Index) -> None:
    live = whole("param", "w", torch.ones(20_000_000))
    assert traced_peak(lambda: load(large, wanted=[live], axis=Solo())) < 5 * 2**20
    assert not live.data.any()


def test_converting_takes_a_few_chunks(large: Index) -> None:
    half = Shard("param", "w", (20_000_000,), 0, torch.zeros(20_000_000, dtype=torch.bfloat16))
    peak = traced_peak(lambda: load(large, wanted=[half], axis=Solo()))
    assert peak < 5 * 8 * 2**20


def test_load_full_takes_the_result_and_little_else(large: Index) -> None:
    peak = traced_peak(lambda: load_full(large.directory))
    assert 80_000_000 <= peak < 80_000_000 + 2 * 2**20


def test_saving_takes_no_copy_of_the_tensors(tmp_path: Path) -> None:
    value = torch.zeros(20_000_000)
    shards = [whole("param", "w", value)]
    peak = traced_peak(lambda: save(tmp_path, "t", shards=shards, facts={}, state={}, rng={}, axis=Solo()))
    assert peak < 2 * 2**20
    shutil.rmtree(tmp_path / "t")
