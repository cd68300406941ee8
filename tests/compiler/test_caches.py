"""Inductor's own cache of generated code: warm at the second start, right when several processes start together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Imports once, and starts by forking: what has been compiled is in none of the three processes, only in the folder.
PROGRAM = """
import json, os, sys, torch
import torch._dynamo, torch._inductor.compile_fx
from tests.compiler.models import compiled, net, run, tokens

torch.set_num_threads(1)


def start(name):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        model = net(depth=2)
        compiler = compiled(model, backend="inductor")
        done = run(model, tokens())
        grad = done.grads["blocks.0.up.weight"]
        found = {
            "output": done.output.flatten()[:8].tolist(), "grad": grad.flatten()[:8].tolist(),
            "hits": compiler.report.cache_hits, "misses": compiler.report.cache_misses,
        }
        with open(os.path.join(sys.argv[1], name), "w") as file:
            json.dump(found, file)
        status = 0
    finally:
        os._exit(status)


def end(*children):
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


end(start("first"), start("second"))
end(start("warm"))
"""


@pytest.mark.timeout(900)
def test_two_cold_starts_at_once_are_right_and_the_next_one_is_warm(tmp_path: Path) -> None:
    # Trying which vector instructions the compiler knows would cost more than all the rest: code without them will do.
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, check=True)
    first, second, warm = (json.loads((tmp_path / name).read_text()) for name in ("first", "second", "warm"))
    for found in (first, second):
        assert found["hits"] + found["misses"] >= 2  # forward and backward
        for key in ("output", "grad"):
            assert found[key] == warm[key]
    assert first["misses"] + second["misses"] >= 2
    assert warm["hits"] >= 2
    assert warm["misses"] == 0
