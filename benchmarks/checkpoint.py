"""What saving and loading cost, as a multiple of raw writes and reads of the same bytes in the same run.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py [--ranks N] [--rounds N] [--megabytes N] [--folder PATH]

The state is a model and its Adam moments in fp32. Contenders take turns, A B C A B C: each saves, then loads. All
that a save wrote is flushed to the disk within its time, by us where the contender does not. Raw: one write of 8 MiB
after another and a flush; reads of 8 MiB into memory that is in use. The page cache is warm, which is hardest for the
contenders: from a cold disk, everybody waits for the disk (`--cold` drops what can be dropped before every load).

DeepSpeed and torch's DCP run where they are installed; a contender that is not is named, not left out silently. Peak
memory: what one load adds to the resident memory of a fresh process, besides its destinations.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sheer
from benchmarks.leftovers import sweep
from benchmarks.report import Result
from sheer.checkpoint import Shard, open_checkpoint
from sheer.checkpoint import load as load_shards
from sheer.cli.demo.launch import free_port
from sheer.comm import data_axis

CHUNK = 8 << 20
WIDTH = 1024


class Contender(Protocol):
    """Somebody who saves all of the state to a folder and loads it into memory that is in use."""

    flushes: bool
    """Whether what it wrote is on the disk when `save` returns."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


def model_of(megabytes: int) -> nn.Module:
    """Layers of 4 MiB each, so that with two moments each the state is of that size."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(megabytes // 12, 1))))


def stepped(engine: Any) -> Any:
    """After one step, so that there are moments."""
    loss = engine(torch.randn(2, WIDTH)).square().mean()
    engine.backward(loss)
    engine.step()
    return engine


@cache
def memory_in_use(megabytes: int) -> memoryview:
    """This rank's share of the bytes."""
    nbytes = max(megabytes // 12, 1) * WIDTH * WIDTH * 4 * 3 // dist.get_world_size()
    return memoryview(bytearray(os.urandom(1 << 20) * (nbytes >> 20)))


@cache
def shards_in_use(megabytes: int) -> list[Shard]:
    """The same as shards: of each tensor this rank's part."""
    part = WIDTH * WIDTH // dist.get_world_size()
    start = part * dist.get_rank()
    return [
        Shard(kind, name, tuple(p.shape), start, p.detach().reshape(-1)[start : start + part].clone())
        for name, p in model_of(megabytes).named_parameters()
        for kind in ("param", "optim.exp_avg", "optim.exp_avg_sq")
    ]


class Raw:
    """This rank's share of the bytes, from and to one buffer."""

    flushes = True

    def __init__(self, megabytes: int) -> None:
        self.memory = memory_in_use(megabytes)

    def _file(self, folder: Path) -> Path:
        return folder / f"rank{dist.get_rank()}"

    def save(self, folder: Path) -> None:
        with self._file(folder).open("wb", buffering=0) as file:
            for at in range(0, len(self.memory), CHUNK):
                file.write(self.memory[at : at + CHUNK])
            os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        with self._file(folder).open("rb", buffering=0) as file:
            for at in range(0, len(self.memory), CHUNK):
                file.readinto(self.memory[at : at + CHUNK])


class RawNew(Raw):
    """The same into memory that nobody has touched, as new optimizer state is: the system makes it page by page."""

    def load(self, folder: Path) -> None:
        used, self.memory = self.memory, memoryview(bytearray(len(self.memory)))
        super().load(folder)
        self.memory = used


class Sheer:
    """A whole engine at stage 1: each rank its part."""

    flushes = True

    def __init__(self, megabytes: int) -> None:
        model = model_of(megabytes)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }
        self.engine = stepped(sheer.initialize(model=model, config=config)[0])

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(folder, "t")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(folder, "t")


class Shards:
    """The checkpoint room alone, the same state as shards in use: nothing may change on an error, so it reads twice."""

    flushes = True

    def __init__(self, megabytes: int) -> None:
        self.axis = data_axis()
        self.shards = shards_in_use(megabytes)

    def save(self, folder: Path) -> None:
        sheer.checkpoint.save(folder, "t", shards=self.shards, facts={}, state={}, rng={}, axis=self.axis)

    def load(self, folder: Path) -> None:
        load_shards(open_checkpoint(folder), wanted=self.shards, axis=self.axis)


class NewShards(Shards):
    """The same, said to be in use by nobody: one read. The memory is the same each time, as the raw read's is."""

    def load(self, folder: Path) -> None:
        load_shards(open_checkpoint(folder), wanted=[], fresh=self.shards, axis=self.axis)


class Plain:
    """A model and torch's AdamW, each rank with all of it."""

    def __init__(self, megabytes: int) -> None:
        self.model = model_of(megabytes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.model(torch.randn(2, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Torch(Plain):
    """torch.save on rank 0, torch.load and load_state_dict on every rank, as with DDP."""

    flushes = False

    def save(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / "t.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "t.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Dcp(Plain):
    """torch.distributed.checkpoint with its file system writer, loading in place."""

    flushes = True

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), checkpoint_id=folder / "t")

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder / "t")
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class DeepSpeed:
    """A whole engine at stage 1: each rank its part of the moments and masters, rank 0 the weights besides."""

    flushes = False

    def __init__(self, megabytes: int) -> None:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        }
        model = model_of(megabytes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.engine = stepped(deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0])

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), "t")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), "t")


CONTENDERS: dict[str, Callable[[int], Contender]] = {
    "raw": Raw,
    "raw, new memory": RawNew,
    "Sheer, shards in use": Shards,
    "Sheer, new shards": NewShards,
    "Sheer, engine": Sheer,
    "torch.save": Torch,
    "DCP": Dcp,
    "DeepSpeed 1": DeepSpeed,
}


# --- the rounds -------------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds, round by round, the slowest rank's."""

    save: list[float]
    load: list[float]
    nbytes: int
    """On disk."""


def files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def each_file(folder: Path, act: Callable[[int], object]) -> None:
    for path in files_in(folder):
        fd = os.open(path, os.O_RDWR)
        act(fd)
        os.close(fd)


def timed(work: Callable[[], object]) -> float:
    """Until the last rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def saved(contender: Contender, folder: Path) -> None:
    contender.save(folder)
    if not contender.flushes:
        dist.barrier()
        if dist.get_rank() == 0:
            each_file(folder, os.fsync)


def measure(root: Path, megabytes: int, rounds: int, *, cold: bool) -> dict[str, Times]:
    """All contenders, interleaved, in this process group; round 0 warms up and is not counted."""
    here = {
        name: make for name, make in CONTENDERS.items() if name[:4] != "Deep" or importlib.util.find_spec("deepspeed")
    }
    contenders = {name: make(megabytes) for name, make in here.items()}
    times = {name: Times([], [], 0) for name in contenders}
    sizes: dict[str, int] = {}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            if dist.get_rank() == 0:
                (root / name).mkdir(parents=True)
            dist.barrier()
            times[name].save.append(timed(lambda: saved(contender, root / name)))  # noqa: B023
            if cold and dist.get_rank() == 0:
                each_file(root / name, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))
            times[name].load.append(timed(lambda: contender.load(root / name)))  # noqa: B023
            sizes[name] = sum(path.stat().st_size for path in files_in(root / name))
            dist.barrier()
            if dist.get_rank() == 0:  # or the page cache of all of them would fill a small machine
                shutil.rmtree(root / name)
        if number == 0:
            for name in contenders:
                times[name].save.clear()
                times[name].load.clear()
    return {name: found._replace(nbytes=sizes[name]) for name, found in times.items()}


# --- resharding and memory, each in a process of its own --------------------------------------------------------------


def pieces(megabytes: int, *, rank: int, world: int) -> list[Shard]:
    """The same tensors for any world: all parameters end to end, cut into equal parts."""
    numel = megabytes * (1 << 18)
    part = numel // world
    return [Shard("param", "w", (numel,), rank * part, torch.ones(part))]


def reshard(root: Path, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Two ranks load what two and four saved. The four are played by these two, one after the other."""
    axis = data_axis()
    for world in (2, 4):
        held = [
            s
            for turn in range(world // 2)
            for s in pieces(megabytes, rank=axis.rank * (world // 2) + turn, world=world)
        ]
        sheer.checkpoint.save(root, f"by{world}", shards=held, facts={}, state={}, rng={}, axis=axis)
    wanted = pieces(megabytes, rank=axis.rank, world=2)
    found: dict[str, list[float]] = {"by2": [], "by4": []}
    for _ in range(rounds + 1):
        for tag, times in found.items():
            times.append(timed(lambda: load_shards(open_checkpoint(root, tag), wanted=wanted, axis=axis)))  # noqa: B023
    return {tag: times[1:] for tag, times in found.items()}


def stall(root: Path, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """How long a save keeps training from going on: a blocking one; the call of one beside training; and that call with
    the next step, whose update waits for the copy of the optimizer's state, beyond a step with no save. The first save
    beside training makes the memory of its copy, and is apart."""
    engine = Sheer(megabytes).engine
    rows = torch.randn(128, WIDTH)

    def step() -> None:
        engine.backward(engine(rows).square().mean())
        engine.step()

    found: dict[str, list[float]] = {"step": [], "blocking": [], "call": [], "with step": []}
    for _ in range(rounds + 1):
        found["step"].append(timed(step))
        found["blocking"].append(timed(lambda: engine.save_checkpoint(root, "t")))
        begin = time.perf_counter()
        found["call"].append(timed(lambda: engine.save_checkpoint(root, "t", blocking=False)))
        step()
        dist.barrier()
        found["with step"].append(time.perf_counter() - begin)
        engine.wait_for_checkpoint()
    first = [found["call"][0]]
    return {**{name: times[1:] for name, times in found.items()}, "first": first}


def peak(root: Path, megabytes: int) -> dict[str, int]:
    """Bytes that a load adds to this process's largest resident size, its destination being in use already."""
    axis = data_axis()
    wanted = pieces(megabytes, rank=axis.rank, world=axis.size)
    sheer.checkpoint.save(root, "t", shards=wanted, facts={}, state={}, rng={}, axis=axis)
    index = open_checkpoint(root)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load_shards(index, wanted=wanted, axis=axis)
    return {
        "shard": wanted[0].data.nbytes,
        "added": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024,
    }


# --- processes --------------------------------------------------------------------------------------------------------


def child(args: argparse.Namespace) -> None:
    """One rank; rank 0 prints the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work: dict[str, Callable[[], Any]] = {
        "times": lambda: measure(args.folder, args.megabytes, args.rounds, cold=args.cold),
        "reshard": lambda: reshard(args.folder, args.megabytes, args.rounds),
        "stall": lambda: stall(args.folder, args.megabytes, args.rounds),
        "peak": lambda: peak(args.folder, args.megabytes),
    }
    found = work[args.child]()
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def elsewhere(what: str, args: argparse.Namespace, *, ranks: int) -> Any:
    """`what`, measured by `ranks` fresh processes in a fresh folder."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--child", what, "--folder", folder, "--result", str(result)]
        command += [
            "--megabytes",
            str(args.megabytes),
            "--rounds",
            str(args.rounds),
            *(["--cold"] if args.cold else []),
        ]
        port = str(free_port())
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        children = [
            subprocess.Popen(
                command,
                env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        errors = [process.communicate()[1] for process in children]
        sweep(port)
        if any(process.returncode for process in children):
            raise SystemExit("\n".join([*errors, f"exit codes {[process.returncode for process in children]}"]))
        return json.loads(result.read_text())


# --- the table --------------------------------------------------------------------------------------------------------


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"{statistics.median(ordered):.2f} | {low:.2f} - {high:.2f}"


def speeds(found: dict[str, Times], verb: str) -> dict[str, list[float]]:
    """Raw's time over each contender's, round by round: how much of the raw speed it reaches."""
    raw = getattr(found["raw"], verb)
    return {name: [r / t for r, t in zip(raw, getattr(times, verb), strict=True)] for name, times in found.items()}


def rows(args: argparse.Namespace) -> list[str]:
    """The tables as lines of Markdown."""
    lines = []
    for ranks in args.ranks:
        found = {name: Times(*times) for name, times in elsewhere("times", args, ranks=ranks).items()}
        save, load = speeds(found, "save"), speeds(found, "load")
        lines += [
            "",
            f"{args.megabytes} MB, {ranks} rank{'s' * (ranks > 1)}{', cold page cache' * args.cold}; "
            f"share of the raw speed, {args.rounds} rounds",
            "",
        ]
        lines += [
            "| | save | spread | load | spread | median s, save / load | on disk |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, times in found.items():
            seconds = f"{statistics.median(times.save):.2f} / {statistics.median(times.load):.2f}"
            lines.append(
                f"| {name} | {spread(save[name])} | {spread(load[name])} | {seconds} | {times.nbytes / 1e6:.0f} MB |"
            )
        lines += [f"| {name} | not installed | | | | | |" for name in CONTENDERS if name not in found]
    again = elsewhere("reshard", args, ranks=2)
    ratios = [four / two for two, four in zip(again["by2"], again["by4"], strict=True)]
    memory = elsewhere("peak", args, ranks=1)
    held = elsewhere("stall", args, ranks=args.ranks[-1])
    blocking, step = (statistics.median(held[name]) for name in ("blocking", "step"))
    calls, both = [t / blocking for t in held["call"]], [(t - step) / blocking for t in held["with step"]]
    return [
        *lines,
        "",
        f"Two ranks load what four saved / what two saved, time, spread: {spread(ratios)}",
        f"A load of {memory['shard'] / 1e6:.0f} MB into memory in use added at most {memory['added'] / 1e6:.1f} MB",
        f"A save beside training ({args.ranks[-1]} ranks), as a share of a blocking one ({blocking:.2f} s), spread: "
        f"the call {spread(calls)}, the first one {held['first'][0] / blocking:.2f}; the call and the step after it, "
        f"beyond a step with no save ({step:.2f} s), {spread(both)}",
    ]


def run(*, quick: bool, rounds: int | None = None) -> Result:
    """The tables with a warm page cache, and the first of them with a cold one."""
    words = ["--megabytes", "200", "--ranks", "1"] if quick else []
    words += ["--rounds", str(rounds or (1 if quick else 5))]
    lines = rows(_arguments(words))
    return Result(lines if quick else [*lines, *rows(_arguments([*words, "--cold", "--ranks", "1"]))[:-4]], None)


def _arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--cold", action="store_true", help="drop the page cache of what is about to be loaded")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        child(arguments)
    print("\n".join(rows(arguments)))


if __name__ == "__main__":
    main()
