"""What a step costs: the raw loop without communication, DDP and Sheer, interleaved in one run.

Every contender trains the same GPT on the same data in its own process group of two ranks of one thread. They take
turns (A B C A B C ...), several steps each, so that a noisy machine disturbs all alike. What is reported is each
contender's step time as a multiple of the raw loop's in the same round: the median over rounds, and the spread.

    python benchmarks/step.py --help
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.gpt import GPT, GPTConfig

CLIP = 1.0
LEARNING_RATE = 1e-3


class Workload(NamedTuple):
    """A model that returns its loss, and a source of micro-batches."""

    model: nn.Module
    batch: Callable[[torch.Generator], tuple[torch.Tensor, ...]]


class WithLoss(nn.Module):
    """A model and a squared error on top."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.body(x), y)


def gpt() -> Workload:
    model = GPT(GPTConfig(vocabulary=4096, width=384, layers=6, heads=6, context=256))

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        tokens = torch.randint(0, 4096, (4, 257), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload(model, batch)


def mlp() -> Workload:
    """Many small tensors."""
    body = nn.Sequential(*(layer for _ in range(100) for layer in (nn.Linear(64, 64), nn.ReLU())))
    return Workload(WithLoss(body), lambda g: (torch.randn(64, 64, generator=g), torch.randn(64, 64, generator=g)))


def small() -> Workload:
    """40 Linear layers of width 32: all overhead."""
    body = nn.Sequential(*(nn.Linear(32, 32) for _ in range(40)))
    return Workload(WithLoss(body), lambda g: (torch.randn(8, 32, generator=g), torch.randn(8, 32, generator=g)))


def conv() -> Workload:
    widths = [3, 32, 64, 128, 256]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 16, 10))
    return Workload(
        WithLoss(body), lambda g: (torch.randn(16, 3, 64, 64, generator=g), torch.randn(16, 10, generator=g))
    )


WORKLOADS = {"gpt": gpt, "mlp": mlp, "small": small, "conv": conv}


# --- contenders: each gives a function that trains one step on a batch and returns the loss --------------------------

Step = Callable[..., torch.Tensor]


def _compile_blocks(model: nn.Module) -> None:
    """By hand, what a user of plain PyTorch would do: each repeated block, or the whole."""
    blocks = getattr(model, "blocks", None)
    for block in blocks if blocks is not None else [model]:
        block.compile()


def _plain_step(module: nn.Module, inner: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(inner.parameters(), lr=LEARNING_RATE, fused=True)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = module(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(inner.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def raw(model: nn.Module, *, compiled: bool) -> Step:
    """No communication at all."""
    if compiled:
        _compile_blocks(model)
    return _plain_step(model, model)


def ddp(model: nn.Module, *, compiled: bool) -> Step:
    if compiled:
        _compile_blocks(model)
    return _plain_step(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), model)


def ours(stage: int) -> Callable[..., Step]:
    def build(model: nn.Module, *, compiled: bool) -> Step:
        import sheer

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "gradient_clipping": CLIP,
            "compile": {"enabled": compiled},
        }
        engine = sheer.initialize(model=model, config=config)[0]

        def step(*batch: torch.Tensor) -> torch.Tensor:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return build


CONTENDERS: dict[str, Callable[..., Step]] = {
    "raw loop, no communication": raw,
    "DDP": ddp,
    "Sheer stage 0": ours(0),
    "Sheer stage 1": ours(1),
    "Sheer stage 2": ours(2),
}


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    name: str
    workload: str
    ranks: int
    rank: int
    port: int
    compiled: bool


def _contend(task: Task, control: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(task.rank),
        WORLD_SIZE=str(task.ranks),
        LOCAL_RANK=str(task.rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(task.port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    workload = WORKLOADS[task.workload]()
    step = CONTENDERS[task.name](workload.model, compiled=task.compiled)
    generator = torch.Generator().manual_seed(task.rank)
    while (steps := control.recv()) is not None:
        batches = [workload.batch(generator) for _ in range(steps)]
        torch.distributed.barrier()
        start = time.perf_counter()
        losses = [step(*batch) for batch in batches]
        torch.distributed.barrier()
        control.send(((time.perf_counter() - start) / steps, [float(loss) for loss in losses]))
    torch.distributed.destroy_process_group()


class Contender:
    """One contender's ranks, waiting for their turn."""

    def __init__(self, name: str, *, workload: str, ranks: int, port: int, compiled: bool) -> None:
        context = mp.get_context("spawn")
        self.name = name
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            task = Task(name, workload, ranks, rank, port, compiled)
            process = context.Process(target=_contend, args=(task, theirs), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def turn(self, steps: int) -> tuple[float, list[float]]:
        """Seconds per step, and rank 0's losses."""
        for pipe in self._pipes:
            pipe.send(steps)
        answers = [pipe.recv() for pipe in self._pipes]
        return max(seconds for seconds, _ in answers), answers[0][1]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=30)


def run(arguments: argparse.Namespace) -> list[str]:
    names = [name for name in CONTENDERS if arguments.ranks > 1 or name != "DDP"]
    if arguments.only:
        names = [name for name in names if any(part in name for part in ("raw", *arguments.only))]
    base_port = arguments.port
    contenders = [
        Contender(name, workload=arguments.model, ranks=arguments.ranks, port=base_port + i, compiled=arguments.compile)
        for i, name in enumerate(names)
    ]
    first_losses = {c.name: c.turn(2)[1] for c in contenders}  # also warms up
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for contender in contenders:
            times[contender.name].append(contender.turn(arguments.steps)[0])
    for contender in contenders:
        contender.stop()
    return _table(arguments, times, first_losses)


def _table(arguments: argparse.Namespace, times: dict[str, list[float]], losses: dict[str, list[float]]) -> list[str]:
    base = times["raw loop, no communication"]
    lines = [
        "| contender | x raw loop (median) | spread (10-90 %) | ms per step | first losses |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in times.items():
        ratios = sorted(own / raw_time for own, raw_time in zip(seconds, base, strict=True))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        milliseconds = statistics.median(seconds) * 1e3
        seen = ", ".join(f"{loss:.5f}" for loss in losses[name])
        lines.append(
            f"| {name} | {statistics.median(ratios):.3f} | {low:.3f} - {high:.3f} | {milliseconds:.2f} | {seen} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="steps per turn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="gpt")
    parser.add_argument("--compile", action="store_true", help="both sides compiled: the blocks, by inductor")
    parser.add_argument("--only", nargs="*", default=[], help="contenders whose name contains one of these")
    parser.add_argument("--port", type=int, default=29710)
    arguments = parser.parse_args()
    command = "python benchmarks/step.py " + " ".join(sys.argv[1:])
    print(f"{command.strip()}\ntorch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores\n")
    print("\n".join(run(arguments)))


if __name__ == "__main__":
    main()
