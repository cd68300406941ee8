"""One rank of one contender: builds what it is told to, trains when it is its turn, and sleeps in between.

Commands come as lines of JSON on standard input, answers go as lines of JSON to a descriptor of their own, because
peers print. When the input ends the process ends. Started by ring.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any, TextIO

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.contenders import CONTENDERS, Job, Trainer
from benchmarks.live import Live, live, peak_above_rest
from benchmarks.profiles import write_profiles
from benchmarks.replay import bare
from benchmarks.sockets import bytes_sent
from benchmarks.workloads import data, make


class Worker:
    """Answers commands; the methods without underscore are the commands."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._trainer: Trainer | None = None

    def build(self, *, workload: str, compiled: bool, accumulation: int, config: dict[str, Any]) -> dict[str, Any]:
        """Start from the common weights and data; returns the seconds of building, without the model's own."""
        made = make(workload)
        self._source = data(made, torch.distributed.get_rank())
        self._accumulation = accumulation
        begin = time.perf_counter()
        self._trainer = CONTENDERS[self._name].build(Job(made.model, compiled, accumulation, config))
        return {"seconds": time.perf_counter() - begin}

    def turn(self, *, steps: int) -> dict[str, Any]:
        """Train: seconds, CPU seconds and bytes sent per step, every loss. Data are made before the clock starts."""
        assert self._trainer is not None
        batches = [self._source(self._accumulation) for _ in range(steps)]
        torch.distributed.barrier()
        sent, busy, start = bytes_sent(), time.process_time(), time.perf_counter()
        losses = [self._trainer.step(batch) for batch in batches]
        sent_after = bytes_sent()
        torch.distributed.barrier()
        return {
            "seconds": (time.perf_counter() - start) / steps,
            "busy": (time.process_time() - busy) / steps,
            "sent": (sent_after - sent) / steps,
            "losses": [float(loss) for loss in losses],
        }

    def state(self) -> dict[str, Any]:
        """Live bytes when the second step's gradients are complete and its update begins."""
        assert self._trainer is not None
        self._trainer.step(self._source(self._accumulation))
        batch = self._source(self._accumulation)
        seen: list[Live] = []

        def look(*_: object) -> None:
            seen.append(live())

        hook = register_optimizer_step_pre_hook(look)
        self._trainer.step(batch)
        hook.remove()
        ours = sum(tensor.nbytes for micro_batch in batch for tensor in micro_batch)
        return {"held": seen[0].held - ours, "idle": seen[0].idle}

    def peak(self) -> dict[str, Any]:
        """Bytes allocated during a step beyond what is there before it."""
        assert self._trainer is not None
        batches = iter([self._source(self._accumulation) for _ in range(2)])
        return {"bytes": peak_above_rest(lambda: self._trainer.step(next(batches)))}

    def replay(self, *, times: int) -> dict[str, Any]:
        """Seconds that one step's collectives take alone, on buffers of the same sizes, all submitted then awaited."""
        assert self._trainer is not None
        counters = self._trainer.engine.traffic
        counters.log = []
        self._trainer.step(self._source(self._accumulation))
        sent, counters.log = counters.log, None
        return {"seconds": bare(sent, times=times)}

    def profile(self, *, folder: str, steps: int) -> dict[str, Any]:
        """Tables of torch's profiler and cProfile of some steps, a file each."""
        assert self._trainer is not None
        batches = [self._source(self._accumulation) for _ in range(2 * steps + 1)]
        self._trainer.step(batches.pop())
        write_profiles(self._trainer.step, batches, folder=folder, name=self._name)
        return {}

    def close(self) -> dict[str, Any]:
        """Let go of what was built."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = None
        torch._dynamo.reset()
        return {}


def _serve(worker: Worker, answers: TextIO) -> None:
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer = getattr(worker, command)(**arguments)
        except Exception as error:
            traceback.print_exc()
            said = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {said[0]}"}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    name, descriptor = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    with os.fdopen(descriptor, "w") as answers:
        _serve(Worker(name), answers)
    os._exit(0)


if __name__ == "__main__":
    main()
