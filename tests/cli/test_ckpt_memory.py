"""`sheer ckpt` on a checkpoint larger than the memory it may have, and what it says meanwhile.

An import is not here: it maps the file, which the limit counts and the memory does not feel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sheer.checkpoint import Shard, save
from sheer.cli import main
from tests.checkpoint.ranks import Solo, whole

SCRIPT = """
import contextlib, io, re, resource, sys
from sheer.cli import main

small, large, room, size = *sys.argv[1:3], *map(int, sys.argv[3:])

def all_of(root, target):
    # One process cannot have its limit lowered for one command and raised for the next, so all run under it.
    with contextlib.redirect_stdout(io.StringIO()):
        return [
            main(["ckpt", "show", root]),
            main(["ckpt", "verify", root]),
            main(["ckpt", "diff", root, root, "--json"]),
            main(["ckpt", "export", root, target + ".safetensors", "--format", "safetensors", "--dtype", "bfloat16"]),
            main(["ckpt", "export", root, target, "--format", "huggingface", "--file-size", "100M"]),
        ]

assert all_of(small, small + "/out") == [0] * 5  # everything is loaded that has to be
used = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
try:
    bytearray(size)
except MemoryError:
    print(all_of(large, large + "/out"))
"""
SIZE = 256 << 20
ROOM = 144 << 20
"""Chunks of 8 MiB, as many as threads have them in hand, and the stacks of the threads."""


def test_memory_stays_below_the_checkpoints_size(tmp_path: Path) -> None:
    for name, numel in (("small", 1000), ("large", SIZE // 4)):
        shards = [Shard("param", "w", (numel,), 0, torch.zeros(numel)), whole("buffer", "b", torch.ones(3))]
        save(tmp_path / name, "t", shards=shards, facts={}, state={}, rng={}, axis=Solo())
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "small"), str(tmp_path / "large"), str(ROOM), str(SIZE)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=100, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[0, 0, 0, 0, 0]"), done.stderr


@pytest.mark.parametrize("action", ["verify", "diff", "export", "import"])
def test_long_work_says_how_far_it_is(action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is there is counted, no more, whatever the pieces and chunks."""
    value = torch.arange(3_000_001.0)
    save(tmp_path, "t", shards=[whole("param", "w", value)], facts={}, state={}, rng={}, axis=Solo())
    target, other = tmp_path / "w.safetensors", str(tmp_path / "w2.safetensors")
    assert main(["ckpt", "export", str(tmp_path), str(target), "--format", "safetensors"]) == 0
    totals: list[int] = []
    done: list[int] = []

    class Bar:
        def __init__(self, *columns: object, **options: object) -> None:
            pass

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *what: object) -> None:
            pass

        def add_task(self, what: str, *, total: int) -> int:
            totals.append(total)
            return 0

        def advance(self, task: int, nbytes: int) -> None:
            done.append(nbytes)

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("rich.progress.Progress", Bar)
    words = {
        "verify": ["verify", str(tmp_path)],
        "diff": ["diff", str(tmp_path), str(tmp_path)],
        "export": ["export", str(tmp_path), other, "--format", "safetensors"],
        "import": ["import", str(target), str(tmp_path / "made")],
    }[action]
    assert main(["ckpt", *words]) == 0
    assert sum(done) == sum(totals) == value.nbytes * (2 if action == "diff" else 1)
    assert len(done) > 1
