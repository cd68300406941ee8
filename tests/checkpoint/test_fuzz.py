"""Ten thousand mutations of a checkpoint: each ends in our error or in the values that were saved, soon and in little
memory. Half strike the bytes of any file; half are changes to the index that are signed anew, as by a tool gone wrong.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sheer.checkpoint import Key, Reader, Request, open_checkpoint, read_rng, read_state, reader, save
from sheer.errors import CheckpointError
from tests.checkpoint.ranks import cut, on_ranks, same, whole
from tests.checkpoint.test_corruption import FILES, content_of, mutate, sign

SHARES = 5
MUTATIONS = 10_000
MOST = 1 << 20
"""Elements that no mutation may make a reader ask for."""


class Inline:
    """In place of threads: most of the time would go by between them."""

    def __init__(self, threads: int) -> None:
        self.map = map

    def shutdown(self) -> None:
        pass


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reader, "ThreadPoolExecutor", Inline)
    shards = [
        *cut("param", "blocks.0.w", torch.arange(700.0), cuts=[100, 333]),
        *cut("buffer", "mask", torch.arange(200) % 3 == 0, cuts=[50]),
        whole("optim.exp_avg", "blocks.0.w", torch.arange(700.0).bfloat16()),
        whole("optim.step", "blocks.0.w", torch.tensor(3)),
        whole("param", "none", torch.zeros(0, 7)),
    ]
    rng, facts = {"cpu": torch.arange(50, dtype=torch.uint8)}, {"ties": {"head": "blocks.0.w"}, "groups": {"a": 1}}
    return on_ranks(
        2,
        lambda axis: save(
            tmp_path, "t", shards=shards[axis.rank :: 2], facts=facts, state={"n": [5, (1,)]}, rng=rng, axis=axis
        ),
    )[0]


def contents(path: Path) -> dict[Any, Any]:
    """All that a checkpoint holds, by one reader."""
    index = open_checkpoint(path)
    tensors: dict[Any, torch.Tensor] = {}
    for key, entry in index.entries():
        assert entry.numel < MOST
        tensors[key] = torch.empty(entry.numel, dtype=entry.torch_dtype)
    with Reader(index) as reader:
        reader.fill(Request(key, 0, flat) for key, flat in tensors.items())
    shapes = {key: entry.shape for key, entry in index.entries()}
    return {"tensors": tensors, "shapes": shapes, "state": read_state(index), "rng": read_rng(index, 1)}


def assert_saved(found: dict[Any, Any], saved: dict[Any, Any]) -> None:
    assert (found["shapes"], found["state"]) == (saved["shapes"], saved["state"])
    for key, value in saved["tensors"].items():
        assert same(found["tensors"][key], value), key
    assert same(found["rng"]["cpu"], saved["rng"]["cpu"])


def strike(data: bytes, source: random.Random) -> bytes:
    """`data` with a bit, a byte, a stretch or its length changed, or two stretches swapped."""
    at, other = sorted(source.randrange(len(data)) for _ in range(2))
    length = source.choice([1, 2, 4, 16, 64, 300])
    ways = (
        lambda: data[:at] + bytes([data[at] ^ 1 << source.randrange(8)]) + data[at + 1 :],
        lambda: data[:at] + source.randbytes(length) + data[at + length :],
        lambda: data[:at] + bytes(length) + data[at + length :],
        lambda: data[:at],
        lambda: data[:at] + data[other:],
        lambda: data[:other] + data[at:],
        lambda: data[:at] + data[other : other + 4] + data[at + 4 : other] + data[at : at + 4] + data[other + 4 :],
        lambda: data.replace(data[at : at + 2], data[other : other + 2]),
    )
    return source.choice(ways)()


@pytest.mark.parametrize("share", range(SHARES))
def test_bytes_that_changed_are_found_or_mean_the_same(path: Path, share: int) -> None:
    source, saved = random.Random(share), contents(path)
    written = {name: (path / name).read_bytes() for name in FILES}
    unfound = []
    for _ in range(MUTATIONS // 2 // SHARES):
        name = source.choice(FILES)
        struck = strike(written[name], source)
        (path / name).write_bytes(struck)
        said = ""
        try:
            assert_saved(contents(path), saved)
        except CheckpointError as error:
            said = str(error)
        if struck != written[name]:
            unfound += [] if name in said else [(name, said)]
        (path / name).write_bytes(written[name])
    assert unfound == [], "a change that nobody saw, though harmless, or said of another file"


@pytest.mark.parametrize("share", range(SHARES))
def test_an_index_signed_anew_is_refused_or_holds_together(path: Path, share: int) -> None:
    source, original = random.Random(100 + share), content_of(path)
    refused = 0
    for _ in range(MUTATIONS // 2 // SHARES):
        changed = mutate(original, source)
        sign(path, json.dumps(changed).encode())
        try:
            found = contents(path)
        except CheckpointError:
            refused += 1
        else:  # what may be said otherwise: names, facts, when it was saved, an equal reading of the same bytes
            assert found["state"] == {"n": [5, (1,)]}
            assert all(isinstance(key, Key) for key in found["tensors"])
    assert refused > MUTATIONS // 2 // SHARES // 2
