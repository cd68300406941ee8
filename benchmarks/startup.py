"""What it costs to begin: `import sheer` against `import torch`, and `initialize` beyond building the model.

Each figure is from a fresh process; the variants take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from benchmarks.contenders import environment
from benchmarks.leftovers import sweep
from benchmarks.report import Result, Spread, table
from benchmarks.ring import ROOT

_IMPORT = """
import time
begin = time.perf_counter()
{what}
print(time.perf_counter() - begin)
"""

_INITIALIZE = """
import json, time
import torch
torch.set_num_threads(1)
from benchmarks.workloads import make
{imports}
torch.distributed.init_process_group("gloo")
model = make("gpt").model
{before}
begin = time.perf_counter()
{build}
print(time.perf_counter() - begin)
"""
_OPTIMIZER = "torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)"
_CONFIG = (
    '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": STAGE}, "gradient_clipping": 1.0, '
    '"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}'
)
_OURS = f"import sheer; sheer.initialize(model=model, config={_CONFIG.replace('STAGE', '2')})"
_THEIRS = (
    "deepspeed.initialize(model=model, optimizer=" + _OPTIMIZER + ", config={'train_micro_batch_size_per_gpu': 1, "
    "'zero_optimization': {'stage': 2}, 'zero_allow_untested_optimizer': True})"
)


def _seconds(code: str, variables: Mapping[str, str]) -> float:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**variables}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"a start failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def _variants() -> dict[str, tuple[str, str]]:
    """Name -> code and the contender whose environment it runs in."""
    plain, theirs = "raw loop, no communication", "DeepSpeed stage 2"

    def initialize(build: str, *, before: str = "", imports: str = "") -> str:
        return _INITIALIZE.format(build=build, before=before, imports=imports)

    first = f"first = {_OPTIMIZER}; del first"
    found = {
        "import torch": (_IMPORT.format(what="import torch"), plain),
        "import sheer": (_IMPORT.format(what="import torch, sheer"), plain),
        "import all of sheer": (_IMPORT.format(what="import torch, sheer; sheer.initialize"), plain),
        "the optimizer alone": (initialize(_OPTIMIZER), plain),
        "sheer.initialize": (initialize(_OURS), plain),
        "sheer.initialize, after an optimizer": (initialize(_OURS, before=first), plain),
        "deepspeed.initialize, after an optimizer": (
            initialize(_THEIRS, before=first, imports="import deepspeed"),
            theirs,
        ),
    }
    if find_spec("deepspeed") is None:
        del found["deepspeed.initialize, after an optimizer"]
    return found


def run(*, rounds: int) -> Result:
    """Medians over rounds."""
    variants = _variants()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, (code, contender) in variants.items():
            variables = environment(contender, rank=0, ranks=1, port=0)
            variables.pop("PYTHONDONTWRITEBYTECODE", None)  # peers were compiled when they were installed
            samples[name].append(_seconds(code, variables))
            sweep(0)
    samples = {name: seconds[1:] for name, seconds in samples.items()}  # in the first, ours is compiled
    rows = []
    for name, seconds in samples.items():
        spread = Spread.of(seconds)
        rows.append([name, f"{spread.median:.2f}", f"{spread.low:.2f} - {spread.high:.2f}"])
    beyond = Spread.of([b - a for a, b in zip(samples["import torch"], samples["import sheer"], strict=True)])
    rows.append(["import sheer beyond import torch", f"{beyond.median:.2f}", f"{beyond.low:.2f} - {beyond.high:.2f}"])
    lines = [
        f"Fresh processes, one rank, the GPT at stage 2, {rounds} rounds. The first optimizer in a process imports "
        "much of torch, whoever builds it; *after an optimizer* leaves that out.",
        "",
        *table(["start", "seconds", "10 - 90 %"], rows),
    ]
    return Result(lines, json.loads(json.dumps(samples)))
