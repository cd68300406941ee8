"""Inductor's own cache of generated code: warm at the second start, right when several processes start together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, torch
from tests.compiler.models import compiled, net, run, tokens

torch.set_num_threads(1)
model = net(depth=2)
compiler = compiled(model, backend="inductor")
done = run(model, tokens())
report = compiler.report
print(json.dumps({
    "output": done.output.flatten()[:8].tolist(), "grad": done.grads["blocks.0.up.weight"].flatten()[:8].tolist(),
    "hits": report.cache_hits, "misses": report.cache_misses, "seconds": report.seconds,
}))
"""


def _start(folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True)


def _end(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    return json.loads(output)


@pytest.mark.timeout(240)
def test_two_cold_starts_at_once_are_right_and_the_next_one_is_warm(tmp_path: Path) -> None:
    processes = [_start(tmp_path), _start(tmp_path)]
    first, second = map(_end, processes)
    warm = _end(_start(tmp_path))
    for found in (first, second):
        assert found["hits"] + found["misses"] >= 2  # forward and backward
        for key in ("output", "grad"):
            assert found[key] == warm[key]
    assert first["misses"] + second["misses"] >= 2
    assert warm["hits"] >= 2
    assert warm["misses"] == 0
