"""What compiling costs: the first step by scope, a warm second start, and a call of a compiled target.

    python benchmarks/compile.py [--rounds N] [--only starts|calls]

Starts: each in a fresh process, the first forward and backward of the benchmark GPT (six equal blocks)
with inductor; cold with an empty cache folder, then warm. Before it compiling is switched on, which tries the backend
and so makes what the machine's toolchain needs once per folder (precompiled headers). Of the first step, about a second
is inductor's own in every process, whatever it compiles.

Calls: a small block with eager kernels, its compiled forward called through the module, against the same function
compiled and called by hand, with the same hooks on both sides. The two take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.gpt import GPT, GPTConfig

from benchmarks.report import Result
from benchmarks.workloads import gpt
from sheer.compiler import Compiler
from sheer.observe import Teller


class Cost(NamedTuple):
    """Seconds of one start: switching on, the first step, and what of it dynamo counts as compiling."""

    enable: float
    step: float
    compiling: float
    made: int

    @property
    def both(self) -> float:
        """Until the first step is done."""
        return self.enable + self.step


# --- starts: each in a process of its own -----------------------------------------------------------------------------


def start(scope: str) -> Cost:
    """The first step, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = gpt()
    batch = workload.batch(torch.Generator().manual_seed(0))
    compiler = Compiler(workload.model, scope=scope, teller=Teller(speaks=False))
    begin = time.perf_counter()
    compiler.enable()
    enabled = time.perf_counter()
    workload.model(*batch).backward()
    done = time.perf_counter()
    return Cost(enabled - begin, done - enabled, compiler.report.seconds, compiler.report.cache_misses)


def _start_elsewhere(scope: str, folder: Path) -> Cost:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    command = [sys.executable, __file__, "--child", scope]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return Cost(*json.loads(done.stdout.splitlines()[-1]))


def starts(rounds: int) -> list[str]:
    lines = ["| round | start | switching on, s | first step, s | compiling, s | made |", "|---|---|---|---|---|---|"]
    ratios: dict[str, list[float]] = {}
    for number in range(rounds):
        costs = _round()
        for name, ratio in _ratios(costs).items():
            ratios.setdefault(name, []).append(ratio)
        lines += [
            f"| {number} | {name} | {c.enable:.1f} | {c.step:.1f} | {c.compiling:.1f} | {c.made} |"
            for name, c in costs.items()
        ]
    lines += ["", "| ratio | median of rounds |", "|---|---|"]
    return lines + [f"| {name} | {statistics.median(found):.2f} |" for name, found in ratios.items()]


def _round() -> dict[str, Cost]:
    costs: dict[str, Cost] = {}
    for scope in ("auto", "module"):
        with tempfile.TemporaryDirectory() as folder:
            for start in ("cold", "warm"):
                costs[f"{scope}, {start}"] = _start_elsewhere(scope, Path(folder))
    return costs


def _ratios(costs: dict[str, Cost]) -> dict[str, float]:
    return {
        "first step, auto / module": costs["auto, cold"].step / costs["module, cold"].step,
        "compiling, auto / module": costs["auto, cold"].compiling / costs["module, cold"].compiling,
        "warm / cold, auto": costs["auto, warm"].both / costs["auto, cold"].both,
        "warm / cold, module": costs["module, warm"].both / costs["module, cold"].both,
    }


# --- calls ------------------------------------------------------------------------------------------------------------


def _by_hand(block: torch.nn.Module, *, hooked: bool) -> Callable[[torch.Tensor], Any]:
    forward = type(block).forward
    compiled = torch.compile(forward, backend="eager")

    def call(x: torch.Tensor) -> Any:
        if hooked:
            _hook(block, (x,))
        return compiled(block, x)

    return call


def _hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """What a user may have on every block."""


def calls(rounds: int, *, hooked: bool, calls_per_turn: int = 200) -> str:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(GPTConfig(vocabulary=64, width=16, layers=6, heads=2, context=8))
    block, x = model.blocks[0], torch.randn(1, 4, 16, requires_grad=True)
    by_hand = _by_hand(block, hooked=hooked)
    by_hand(x)
    if hooked:
        block.register_forward_pre_hook(_hook)
    Compiler(model, backend="eager", teller=Teller(speaks=False)).enable()
    block(x)

    def turn(function: Callable[[torch.Tensor], Any]) -> float:
        begin = time.process_time()
        for _ in range(calls_per_turn):
            function(x)
        return (time.process_time() - begin) / calls_per_turn * 1e6

    pairs = [(turn(block), turn(by_hand)) for _ in range(rounds)]
    more = sorted(through - hand for through, hand in pairs)
    modules = sum(1 for _ in block.modules())
    return (
        f"| {'one pre-hook' if hooked else 'no hooks'} | {modules} | {statistics.median(h for _, h in pairs):.1f} |"
        f" {statistics.median(more):+.1f} | {more[len(more) // 10]:+.1f} to {more[-1 - len(more) // 10]:+.1f} |"
    )


def _calls() -> list[str]:
    lines = ["| hooks | modules in the block | by hand, us | Sheer adds, us | 10-90 % |", "|---|---|---|---|---|"]
    return lines + [calls(40, hooked=hooked) for hooked in (False, True)]


def run(*, rounds: int) -> Result:
    """Both tables, for the page."""
    lines = [*_calls(), "", *starts(rounds)]
    return Result(lines, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="of starts; each takes one or two minutes")
    parser.add_argument("--only", choices=["starts", "calls"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(start(arguments.child)))
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores\n")
    if arguments.only != "starts":
        print("\n".join(_calls()) + "\n")
    if arguments.only != "calls":
        print("\n".join(starts(arguments.rounds)))


if __name__ == "__main__":
    main()
