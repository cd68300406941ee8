"""What a pipeline costs: a GPT on two stages, 8 micro-batches a step, one thread per stage.

Contenders run 1F1B over the same cut, each in two processes of its own, and take turns; every step ends with AdamW's
update. The ideal is the time of 1F1B with free messages, simulated from the stages' own forwards and backwards, which
are measured in the same turns with both processes busy, and one update by torch. "Runner" is ours without the engine
around it.

    python -m benchmarks.pipeline [--rounds 7] [--tiny]        DS_ACCELERATOR=cpu LOCAL_SIZE=2 for DeepSpeed
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from examples.gpt import Block, GPTConfig
from torch import Tensor, nn

import sheer
from benchmarks.leftovers import sweep
from benchmarks.report import Bar, Result, Spread, table
from sheer import comm
from sheer.cli.demo.launch import free_port
from sheer.pipeline import Runner, routes
from sheer.schedule import Kind, in_flight, one_f_one_b, simulate

STAGES, MICRO_BATCHES = 2, 8
CPU = torch.device("cpu")
RUNNER = "Sheer, runner alone"


class Work(NamedTuple):
    """What is trained."""

    shape: GPTConfig
    batch: int
    steps: int
    """Per turn."""

    @property
    def cut(self) -> list[int]:
        """Where stages begin and end; the first has one block more, for the head is as much as one."""
        count = self.shape.layers + 2
        return [0, count // 2, count]


GPT = Work(GPTConfig(vocabulary=4096, width=384, layers=6, heads=6, context=256), batch=4, steps=1)
TINY = Work(GPTConfig(vocabulary=64, width=32, layers=6, heads=2, context=16), batch=1, steps=20)
"""Microseconds of arithmetic: what is left is the engines' own time."""


class Embed(nn.Module):
    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.embed, self.position = (
            nn.Embedding(shape.vocabulary, shape.width),
            nn.Embedding(shape.context, shape.width),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.position.weight[: tokens.shape[1]]


class Head(nn.Module):
    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def layers(shape: GPTConfig) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Embed(shape), *(Block(shape) for _ in range(shape.layers)), Head(shape)]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(work: Work) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    size = (work.batch, work.shape.context)
    both = [torch.randint(0, work.shape.vocabulary, size, generator=generator) for _ in range(2 * MICRO_BATCHES)]
    return both[:MICRO_BATCHES], both[MICRO_BATCHES:]


class Turn(NamedTuple):
    """What one step took on one stage, with its update."""

    seconds: float
    loss: float


class Costs(NamedTuple):
    """Seconds of one stage, without messages."""

    forward: float
    backward: float
    update: float


class Contender:
    """Trains; see the subclasses."""

    def step(self, inputs: list[Tensor], labels: list[Tensor]) -> Turn:
        """One step, timed."""
        raise NotImplementedError

    def costs(self) -> Costs:
        """What this stage's own work takes."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What was counted."""
        return {}


class Stage(Contender):
    """What the contenders share that do not bring an engine."""

    def __init__(self, rank: int, work: Work) -> None:
        self.rank, self.work = rank, work
        self.stage = nn.Sequential(*layers(work.shape)[work.cut[rank] : work.cut[rank + 1]])
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), lr=1e-3, fused=True)

    def timed(self, run: Callable[[], Sequence[Tensor]]) -> Turn:
        start = time.perf_counter()
        losses = run()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = float(torch.stack([loss.detach() for loss in losses]).mean()) if losses else 0.0
        return Turn(time.perf_counter() - start, loss)


class OurRunner(Stage):
    def __init__(self, rank: int, work: Work) -> None:
        super().__init__(rank, work)
        self.schedule = one_f_one_b(STAGES, MICRO_BATCHES)
        self.links = comm.build_links(comm.data_axis(), routes(self.schedule))
        self.runner = Runner(
            self.schedule,
            stage=rank,
            run=lambda carry, chunk: self.stage(carry),
            loss=loss_fn,
            links=self.links,
            device=CPU,
        )

    def step(self, inputs: list[Tensor], labels: list[Tensor]) -> Turn:
        return self.timed(lambda: self.runner.step(inputs, labels).losses)

    def costs(self) -> Costs:
        inputs, labels = batches(self.work)
        forward = backward = 0.0
        for x, y in zip(inputs, labels, strict=True):
            carried = torch.randn(self.work.batch, self.work.shape.context, self.work.shape.width, requires_grad=True)
            start = time.perf_counter()
            output = self.stage(carried if self.rank else x)
            loss = loss_fn(output, y) if self.rank else output
            middle = time.perf_counter()
            loss.backward(None if self.rank else torch.ones_like(loss))
            forward += middle - start
            backward += time.perf_counter() - middle
        start = time.perf_counter()
        self.optimizer.step()
        update = time.perf_counter() - start
        self.optimizer.zero_grad()
        return Costs(forward / MICRO_BATCHES, backward / MICRO_BATCHES, update)

    def facts(self) -> dict[str, Any]:
        counters = self.links.counters
        activation = self.work.batch * self.work.shape.context * self.work.shape.width * 4
        return {
            "beyond": (counters.control_bytes + counters.tensor_bytes) / counters.messages - activation,
            "peak": self.runner.peak_in_flight,
            "expected": in_flight(self.schedule.actions[self.rank]),
        }


class Torch(Stage):
    """`torch.distributed.pipelining`, as its documentation writes it."""

    def __init__(self, rank: int, work: Work) -> None:
        super().__init__(rank, work)
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        stage = PipelineStage(self.stage, rank, STAGES, CPU)
        self.run = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn, scale_grads=False)

    def step(self, inputs: list[Tensor], labels: list[Tensor]) -> Turn:
        x, y = torch.cat(inputs), torch.cat(labels)

        def run() -> list[Tensor]:
            losses: list[Tensor] = []
            if self.rank == 0:
                self.run.step(x)
            else:
                self.run.step(target=y, losses=losses)
            return losses

        return self.timed(run)


class Engine(Contender):
    """An engine's `train_batch`."""

    engine: Any

    def step(self, inputs: list[Tensor], labels: list[Tensor]) -> Turn:
        data = iter(list(zip(inputs, labels, strict=True)))
        start = time.perf_counter()
        loss = self.engine.train_batch(data)
        return Turn(time.perf_counter() - start, float(loss))


def _config(work: Work, **params: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, **params}},
        "zero_optimization": {"stage": 0},
    }


class Ours(Engine):
    def __init__(self, rank: int, work: Work) -> None:
        module = sheer.PipelineModule(layers(work.shape), num_stages=STAGES, loss_fn=loss_fn, boundaries=work.cut)
        self.engine = sheer.initialize(model=module, config=_config(work))[0]


class DeepSpeed(Engine):
    def __init__(self, rank: int, work: Work) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed("gloo")
        module = PipelineModule(layers(work.shape), num_stages=STAGES, loss_fn=loss_fn, partition_method="uniform")
        self.engine, *_ = deepspeed.initialize(model=module, config=_config(work, torch_adam=True))


CONTENDERS: dict[str, Callable[[int, Work], Contender]] = {
    "Sheer": Ours,
    RUNNER: OurRunner,
    "torch.distributed.pipelining": Torch,
    "DeepSpeed": DeepSpeed,
}


def _contend(name: str, work: Work, rank: int, port: int, control: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", str(STAGES))
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": STAGES, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in here.items()}, MASTER_ADDR="127.0.0.1")
    torch.distributed.init_process_group("gloo")
    try:
        contender = CONTENDERS[name](rank, work)
        inputs, labels = batches(work)
        while (command := control.recv()) is not None:
            torch.distributed.barrier()
            if command == "step":
                done: Any = [contender.step(inputs, labels) for _ in range(work.steps)]
            else:
                done = getattr(contender, command)()
            torch.distributed.barrier()
            control.send(done)
    except Exception:
        control.send(traceback.format_exc())
    torch.distributed.destroy_process_group()


class Pair:
    """The two processes of one contender."""

    def __init__(self, name: str, work: Work) -> None:
        self.port = port = free_port()
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(STAGES)]
        self.pipes = [mine for mine, _ in pipes]
        self.processes = [
            context.Process(target=_contend, args=(name, work, rank, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def ask(self, command: str) -> list[Any]:
        for pipe in self.pipes:
            with suppress(BrokenPipeError):  # it has failed, and says why
                pipe.send(command)
        answers = [pipe.recv() for pipe in self.pipes]
        wrong = [answer for answer in answers if isinstance(answer, str)]
        if wrong:
            raise RuntimeError(wrong[0])
        return answers

    def stop(self) -> None:
        for pipe in self.pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)
        for process in self.processes:
            process.join(timeout=30)
        sweep(self.port)


def ideal(costs: Sequence[Costs]) -> float:
    """Seconds of 1F1B with free messages, from each stage's forward and backward, and of the longer update."""
    place = {Kind.FORWARD: 0, Kind.BACKWARD: 1}
    schedule = one_f_one_b(STAGES, MICRO_BATCHES)
    length = simulate(schedule, cost=lambda kind, v: costs[v][place[kind]] if kind in place else 0.0).length
    return length + max(one.update for one in costs)


class Race(NamedTuple):
    """Seconds of a step, by contender and turn; those of the ideal; first losses; what the runner counted."""

    steps: dict[str, list[float]]
    bounds: list[float]
    first: dict[str, float]
    facts: list[dict[str, Any]]


def race(work: Work, rounds: int) -> Race:
    """Let them take turns."""
    names = [name for name in CONTENDERS if name != "DeepSpeed" or find_spec("deepspeed")]
    pairs = {name: Pair(name, work) for name in names}
    first = {name: pair.ask("step")[-1][0].loss for name, pair in pairs.items()}
    bounds: list[float] = []
    steps: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        before = ideal(pairs[RUNNER].ask("costs"))
        for name, pair in pairs.items():
            turns = pair.ask("step")
            steps[name].append(statistics.median(max(one.seconds for one in both) for both in zip(*turns, strict=True)))
        bounds.append((before + ideal(pairs[RUNNER].ask("costs"))) / 2)
    facts = pairs[RUNNER].ask("facts")
    for pair in pairs.values():
        pair.stop()
    return Race(steps, bounds, first, facts)


def run(work: Work, rounds: int) -> Result:
    """Race them, and tell."""
    found = race(work, rounds)
    rows, bars = [], []
    for name, seconds in found.steps.items():
        spread = Spread.of([own / bound for own, bound in zip(seconds, found.bounds, strict=True)])
        cells = [f"{spread.median:.3f}", f"{spread.low:.3f} - {spread.high:.3f}"]
        rows.append([name, *cells, f"{statistics.median(seconds) * 1e3:.1f}", f"{found.first[name]:.5f}"])
        bars.append(Bar(name, spread, ours=name.startswith("Sheer")))
    beyond = ", ".join(f"{fact['beyond']:.0f}" for fact in found.facts)
    held = ", ".join(f"{fact['peak']} of {fact['expected']}" for fact in found.facts)
    lines = [
        *table(["contender", "x ideal 1F1B", "10 - 90 %", "ms a step", "first loss"], rows),
        "",
        f"Ideal: {statistics.median(found.bounds) * 1e3:.1f} ms, over {rounds} rounds. Bytes a message beyond its "
        f"activations, by stage: {beyond}. Micro-batches held at most, of the schedule's own number: {held}.",
    ]
    wrong = tuple(name for name, loss in found.first.items() if abs(loss - found.first[RUNNER]) > 1e-4)
    return Result(lines, {"steps": found.steps, "ideal": found.bounds}, tuple(bars), wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="micro-batches of microseconds, for the engines' own time")
    arguments = parser.parse_args()
    print("\n".join(run(TINY if arguments.tiny else GPT, arguments.rounds).lines))


if __name__ == "__main__":
    main()
