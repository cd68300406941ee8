"""What a pipeline costs: a GPT of 14 M parameters on two stages, 8 micro-batches, one thread per stage.

Three contenders run 1F1B over the same cut, each in two processes of its own, and take turns. The ideal is the time of
1F1B with free messages, simulated from the stages' own forwards and backwards, which are measured in the same turns
with both processes busy. DeepSpeed's engine makes the update (AdamW) in the same call, so its multiple of the ideal has
it in; the last but one column has it for all.

    python -m benchmarks.pipeline [--rounds 7]        DS_ACCELERATOR=cpu LOCAL_SIZE=2 for DeepSpeed, where installed
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

from benchmarks.report import Result, Spread, table
from sheer import comm
from sheer.pipeline import Runner, routes
from sheer.schedule import Kind, in_flight, one_f_one_b, simulate

STAGES, MICRO_BATCHES = 2, 8
SHAPE = GPTConfig(vocabulary=4096, width=384, layers=6, heads=6, context=256)
BATCH = 4
CUT = [0, 4, 8]
CPU = torch.device("cpu")


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = (
            nn.Embedding(SHAPE.vocabulary, SHAPE.width),
            nn.Embedding(SHAPE.context, SHAPE.width),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.position.weight[: tokens.shape[1]]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(SHAPE.width), nn.Linear(SHAPE.width, SHAPE.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Embed(), *(Block(SHAPE) for _ in range(SHAPE.layers)), Head()]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    both = [torch.randint(0, SHAPE.vocabulary, (BATCH, SHAPE.context), generator=generator) for _ in range(16)]
    return both[:MICRO_BATCHES], both[MICRO_BATCHES:]


class Turn(NamedTuple):
    """What one step took on one stage."""

    seconds: float
    """Forwards and backwards; DeepSpeed's update too."""
    whole: float
    """With the update."""
    loss: float


class Contender:
    """Trains; see the subclasses."""

    def step(self, inputs: list[Tensor], labels: list[Tensor]) -> Turn:
        """One step, timed."""
        raise NotImplementedError

    def costs(self) -> tuple[float, float]:
        """Seconds of one forward and one backward of this stage, without messages."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What was counted."""
        return {}


class Stage(Contender):
    """What the contenders share that do not bring an engine."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.stage = nn.Sequential(*layers()[CUT[rank] : CUT[rank + 1]])
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), lr=1e-3, fused=True)

    def timed(self, run: Callable[[], Sequence[Tensor]]) -> Turn:
        start = time.perf_counter()
        losses = run()
        middle = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = float(torch.stack([loss.detach() for loss in losses]).mean()) if losses else 0.0
        return Turn(middle - start, time.perf_counter() - start, loss)


class Ours(Stage):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
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

    def costs(self) -> tuple[float, float]:
        inputs, labels = batches()
        forward = backward = 0.0
        for x, y in zip(inputs, labels, strict=True):
            given = x if self.rank == 0 else torch.randn(BATCH, SHAPE.context, SHAPE.width, requires_grad=True)
            start = time.perf_counter()
            output = self.stage(given)
            loss = loss_fn(output, y) if self.rank else output
            middle = time.perf_counter()
            loss.backward(None if self.rank else torch.ones_like(loss))
            forward += middle - start
            backward += time.perf_counter() - middle
        self.optimizer.zero_grad()
        return forward / MICRO_BATCHES, backward / MICRO_BATCHES

    def facts(self) -> dict[str, Any]:
        counters = self.links.counters
        activation = BATCH * SHAPE.context * SHAPE.width * 4
        return {
            "beyond": (counters.control_bytes + counters.tensor_bytes) / counters.messages - activation,
            "peak": self.runner.peak_in_flight,
            "expected": in_flight(self.schedule.actions[self.rank]),
        }


class Torch(Stage):
    """`torch.distributed.pipelining`, as its documentation writes it."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
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


class DeepSpeed(Contender):
    def __init__(self, rank: int) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed("gloo")
        module = PipelineModule(layers(), num_stages=STAGES, loss_fn=loss_fn, partition_method="uniform")
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": 0},
        }
        self.engine, *_ = deepspeed.initialize(model=module, config=config)

    def step(self, inputs: list[Tensor], labels: list[Tensor]) -> Turn:
        data = iter(list(zip(inputs, labels, strict=True)))
        start = time.perf_counter()
        loss = self.engine.train_batch(data)
        seconds = time.perf_counter() - start
        return Turn(seconds, seconds, float(loss))


CONTENDERS: dict[str, Callable[[int], Contender]] = {
    "Sheer (runner)": Ours,
    "torch.distributed.pipelining": Torch,
    "DeepSpeed": DeepSpeed,
}


def _contend(name: str, rank: int, port: int, control: Connection) -> None:
    torch.set_num_threads(1)
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": STAGES, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in here.items()}, MASTER_ADDR="127.0.0.1")
    torch.distributed.init_process_group("gloo")
    try:
        contender = CONTENDERS[name](rank)
        inputs, labels = batches()
        while (command := control.recv()) is not None:
            torch.distributed.barrier()
            done = contender.step(inputs, labels) if command == "step" else getattr(contender, command)()
            torch.distributed.barrier()
            control.send(done)
    except Exception:
        control.send(traceback.format_exc())
    torch.distributed.destroy_process_group()


class Pair:
    """The two processes of one contender."""

    def __init__(self, name: str, port: int) -> None:
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(STAGES)]
        self.pipes = [mine for mine, _ in pipes]
        self.processes = [
            context.Process(target=_contend, args=(name, rank, port, theirs), daemon=True)
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


def ideal(costs: Sequence[tuple[float, float]]) -> float:
    """Seconds of 1F1B with free messages, from each stage's forward and backward."""
    place = {Kind.FORWARD: 0, Kind.BACKWARD: 1}
    schedule = one_f_one_b(STAGES, MICRO_BATCHES)
    return simulate(schedule, cost=lambda kind, v: costs[v][place[kind]] if kind in place else 0.0).length


def run(rounds: int, *, port: int = 29910) -> Result:
    """Race them."""
    names = [name for name in CONTENDERS if name != "DeepSpeed" or find_spec("deepspeed")]
    pairs = {name: Pair(name, port + number) for number, name in enumerate(names)}
    first = {name: pair.ask("step")[-1].loss for name, pair in pairs.items()}
    bounds: list[float] = []
    steps: dict[str, list[float]] = {name: [] for name in names}
    wholes: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        bounds.append(ideal(pairs["Sheer (runner)"].ask("costs")))
        for name, pair in pairs.items():
            turns = pair.ask("step")
            steps[name].append(max(turn.seconds for turn in turns))
            wholes[name].append(max(turn.whole for turn in turns))
        bounds[-1] = (bounds[-1] + ideal(pairs["Sheer (runner)"].ask("costs"))) / 2
    facts = pairs["Sheer (runner)"].ask("facts")
    for pair in pairs.values():
        pair.stop()
    return Result(_lines(steps, wholes, bounds, first, facts), {"steps": steps, "wholes": wholes, "ideal": bounds})


def _lines(
    steps: dict[str, list[float]],
    wholes: dict[str, list[float]],
    bounds: list[float],
    first: dict[str, float],
    facts: list[dict[str, Any]],
) -> list[str]:
    rows = []
    for name, seconds in steps.items():
        ratio = Spread.of([own / bound for own, bound in zip(seconds, bounds, strict=True)])
        cells = [f"{ratio.median:.3f}", f"{ratio.low:.3f} - {ratio.high:.3f}"]
        rows.append([name, *cells, f"{statistics.median(wholes[name]) * 1e3:.0f}", f"{first[name]:.5f}"])
    lines = table(["contender", "x ideal 1F1B", "spread (10-90 %)", "ms with update", "first loss"], rows)
    beyond = ", ".join(f"{fact['beyond']:.0f}" for fact in facts)
    held = ", ".join(f"{fact['peak']} of {fact['expected']}" for fact in facts)
    return [
        *lines,
        "",
        f"Ideal: {statistics.median(bounds) * 1e3:.0f} ms. Bytes a message beyond its activations, by stage: {beyond}. "
        f"Micro-batches held at most, of the schedule's own number: {held}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print("\n".join(run(arguments.rounds).lines))


if __name__ == "__main__":
    main()
