"""Makes checkpoints with the real DeepSpeed 0.19.8, and says what it made of them itself.

    python -m tests.checkpoint.formats.make_deepspeed FOLDER [KIND ...]    into FOLDER/KIND, all kinds by default
    python -m tests.checkpoint.formats.make_deepspeed --golden [KIND ...]    the archives in golden/

Beside a checkpoint lie `after.json`, the losses of DeepSpeed's next steps after its own load, and `expected.pt`, what
its own accessors (`safe_get_full_fp32_param` and so on) gave when it was saved. Needs deepspeed, which changes torch
when it is imported: it only ever is in the processes that are started here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.leftovers import sweep
from torch import nn

from sheer.cli.demo.launch import free_port

GOLDEN = Path(__file__).parent / "golden"
STEPS, MORE = 3, 3
"""Steps before the checkpoint and after it."""
MICRO = 4
LOAD = "load"
"""In place of a kind: load what is in the folder, and train on."""
_STATES = ("exp_avg", "exp_avg_sq")


class Kind(NamedTuple):
    """One checkpoint to make."""

    stage: int
    precision: str = "fp32"
    world: int = 2
    stages: int = 0
    """Of a pipeline; 0 for a plain model."""
    zero: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    universal: bool = False
    fused: bool = False
    """Kept flat at stage 0, as DeepSpeed does with optimizers of its own (which need a compiler)."""
    reloads: bool = True
    """Whether DeepSpeed can load it itself; else the losses are those of going on."""
    comparable: int = MORE
    """How many losses after the load can be the same here."""


KINDS = {
    "plain": Kind(0, world=1),
    # In fp16 at stage 0 DeepSpeed's moments are too small by about the loss scale, as if gradients never had it.
    "plain-fp16": Kind(0, "fp16", world=1, comparable=1),
    "plain-bf16": Kind(0, "bf16"),
    "plain-fp16-fused": Kind(0, "fp16", world=1, fused=True, comparable=1),
    "plain-bf16-fused": Kind(0, "bf16", fused=True),
    "zero1": Kind(1),
    "zero1-universal": Kind(1, universal=True),
    "zero1-bf16-fp32-gradients": Kind(1, "bf16", extra={"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero2-fp16-3-ranks": Kind(2, "fp16", world=3),
    "zero2-bf16-alone": Kind(2, "bf16", world=1),
    "zero3-bf16": Kind(3, "bf16", zero={"stage3_param_persistence_threshold": 0}),
    "zero3-small-groups": Kind(3, world=3, zero={"stage3_param_persistence_threshold": 0, "sub_group_size": 10}),
    "zero3-universal": Kind(3, universal=True),
    "pipeline-zero1": Kind(1, world=2, stages=2),
    "pipeline-bf16": Kind(0, "bf16", world=2, stages=2, reloads=False),
    "pipeline-zero1-4-ranks": Kind(1, "bf16", world=4, stages=2),
}


class Net(nn.Module):
    """Two groups, a frozen layer, tied weights, buffers. (DeepSpeed cannot save a parameter without dimensions.)"""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.mid = nn.Linear(5, 5, bias=False)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.mid.weight
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.last = nn.Linear(5, 1)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.count += 1
        h = torch.tanh(self.frozen(torch.tanh(self.first(x.to(self.first.bias.dtype)))))
        h = self.tied(torch.tanh(self.mid(h))) * self.scale
        return (self.last(h).squeeze(-1).float() - y).square().mean()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim == 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(MICRO, 6, generator=generator), torch.randn(MICRO, generator=generator)


def batches(first: int, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return (batch(number, rank) for number in itertools.count(first))


def config(kind: Kind) -> dict[str, Any]:
    """Understood by DeepSpeed and by this library."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "zero_optimization": {"stage": kind.stage, **kind.zero},
        "gradient_clipping": 1.0,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 5, "warmup_max_lr": [0.01, 0.02], "warmup_min_lr": [0.001, 0.002]},
        },
        **kind.extra,
    }
    if kind.stages:
        made["gradient_accumulation_steps"] = 2
        made["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
        made["scheduler"]["params"] |= {"warmup_max_lr": 0.01, "warmup_min_lr": 0.001}
    if kind.precision == "bf16":
        made["bf16"] = {"enabled": True}
    if kind.precision == "fp16":
        made["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2}
    return made


def layers(spec: Callable[..., Any], tied_spec: Callable[..., Any]) -> list[Any]:
    """A pipeline's layers, of DeepSpeed's classes or this library's. Two layers are one; of tied ones no bias is."""
    return [
        spec(nn.Linear, 6, 5),
        tied_spec("t", nn.Linear, 5, 5, bias=False),
        torch.tanh,
        spec(nn.Linear, 5, 5),
        tied_spec("t", nn.Linear, 5, 5, bias=False),
        spec(nn.Linear, 5, 1),
    ]


def pipeline_loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out.squeeze(-1).float() - y.float()).square().mean()


# --- in the processes that have DeepSpeed -----------------------------------------------------------------------------


def _engine(kind: Kind, seed: int) -> Any:
    import deepspeed
    import deepspeed.runtime.engine

    fused = torch.optim.AdamW if kind.fused else torch.optim.SparseAdam
    deepspeed.runtime.engine.FusedAdam = fused  # which optimizers it takes for fused ones
    settings = {**config(kind), "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if not kind.stages:
        model = Net(seed)
        return deepspeed.initialize(model=model, optimizer=optimizer(model), config=settings)[0]
    torch.manual_seed(seed)
    module = deepspeed.pipe.PipelineModule(
        layers(deepspeed.pipe.LayerSpec, deepspeed.pipe.TiedLayerSpec),
        num_stages=kind.stages,
        loss_fn=pipeline_loss,
        partition_method="uniform",
    )
    return deepspeed.initialize(model=module, config=settings)[0]


def _train(engine: Any, kind: Kind, steps: range) -> list[float]:
    rank = engine.grid.get_data_parallel_rank() if kind.stages else int(os.environ["RANK"])
    losses = []
    for step in steps:
        if kind.stages:
            dtype = next(engine.module.parameters()).dtype
            data = ((x.to(dtype), y) for x, y in batches(2 * step, rank))
            loss = engine.train_batch(data)
        else:
            loss = engine(*batch(step, rank))
            engine.backward(loss)
            engine.step()
        mean = loss.detach().clone().reshape(1)
        torch.distributed.all_reduce(mean)  # noqa: TID251  (no engine of ours is here)
        losses.append(float(mean) / kind.world)
    return losses


def _expected(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """By DeepSpeed's own accessors; collective at stage 3. At stages 1 and 2 it gives no moments on a CPU."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    states = _STATES if engine.zero_optimization_stage() == 3 else ()
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            held[name] = {"fp32": safe_get_full_fp32_param(param)}
            held[name].update({key: safe_get_full_optimizer_state(param, key) for key in states})
    return {name: {key: v.detach().clone() for key, v in values.items()} for name, values in held.items()}


def _make(kind: Kind, folder: Path) -> None:
    engine = _engine(kind, 0)
    _train(engine, kind, range(STEPS))
    state = {"mine": [1, {"a": 2.5}], "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(str(folder), client_state=state)
    expected = _expected(engine) if kind.stage and not kind.stages else {}
    if kind.reloads:
        engine = _engine(kind, 1)
        engine.load_checkpoint(str(folder))
    after = _train(engine, kind, range(STEPS, STEPS + MORE))
    if os.environ["RANK"] == "0":
        torch.save(expected, folder / "expected.pt")
        (folder / "after.json").write_text(json.dumps(after))
        for script in folder.glob("*.py"):  # DeepSpeed leaves copies of its converters
            script.unlink()
        if kind.universal:
            _convert(folder)


def _load(folder: Path) -> None:
    """Train on from the universal checkpoint in `folder`. DeepSpeed loads nothing frozen from it; that begins alike."""
    kind = KINDS["zero1"]._replace(stage=2, extra={"checkpoint": {"load_universal": True}})
    engine = _engine(kind, 0)
    engine.load_checkpoint(str(folder))
    after = _train(engine, kind, range(STEPS, STEPS + MORE))
    if os.environ["RANK"] == "0":
        (folder / "after.json").write_text(json.dumps(after))


def _convert(folder: Path) -> None:
    """Leave only the universal form, which is what DeepSpeed's converter makes."""
    import shutil

    from deepspeed.checkpoint import ds_to_universal

    tag = (folder / "latest").read_text()
    arguments = ["--input_folder", str(folder / tag), "--output_folder", str(folder / "universal" / tag)]
    sys.argv = ["ds_to_universal", *arguments, "--num_extract_workers", "1", "--num_merge_workers", "1"]
    ds_to_universal.main(ds_to_universal.parse_arguments())
    shutil.rmtree(folder / tag)
    shutil.move(folder / "universal" / tag, folder / tag)
    shutil.move(folder / "universal" / "latest_universal", folder / "latest_universal")
    (folder / "universal").rmdir()
    (folder / "latest").unlink()


def _rank_main(root: Path, kinds: list[str]) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    # On a CPU DeepSpeed refuses fp16, and compiles a communication library when it starts; neither is of interest here.
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    builder = accelerator.create_op_builder
    accelerator.create_op_builder = lambda name: None if name == "ShareMemCommBuilder" else builder(name)
    deepspeed.init_distributed("gloo")
    for name in kinds:
        if name == LOAD:
            _load(root)
        else:
            _make(KINDS[name], root / name)
        torch.distributed.barrier()  # noqa: TID251
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's exit hooks wait for a monitor that was never there


# --- outside ----------------------------------------------------------------------------------------------------------


def make(root: Path, kinds: list[str]) -> None:
    """Make `root/KIND` for each of `kinds`, with one start of processes per world size."""
    for world in sorted({KINDS[name].world for name in kinds}):
        _start(root, [name for name in kinds if KINDS[name].world == world], world=world)


def load(folder: Path) -> None:
    """Let DeepSpeed train on from the universal checkpoint in `folder`, on two ranks; `after.json` has the losses."""
    _start(folder, [LOAD], world=2)


def _start(root: Path, kinds: list[str], *, world: int) -> None:
    """Run `_rank_main` on `world` processes."""
    common = {"WORLD_SIZE": world, "LOCAL_SIZE": 64, "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1"}
    port = free_port()
    common |= {"MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    with contextlib.ExitStack() as stack:
        stack.callback(sweep, port)
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world)]
        ranks = []
        for rank in range(world):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.checkpoint.formats.make_deepspeed", "--rank", str(root), *kinds],
                env={**os.environ, **{k: str(v) for k, v in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}},
                stdout=said[rank],
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        deadline = time.monotonic() + 300
        # Until all have ended well, or one has not: the others would wait for it.
        while not all(codes := [process.poll() == 0 for process in ranks]):
            if any(process.returncode for process in ranks) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if not all(codes):
            for file in said:
                file.seek(0)
            told = [f"rank {i} of {kinds}: {ranks[i].returncode}\n{file.read()[-4000:]}" for i, file in enumerate(said)]
            raise RuntimeError("\n".join(told))


def _make_golden(kinds: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch), kinds)
        for name in kinds:
            with zipfile.ZipFile(GOLDEN / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
                for path in sorted((Path(scratch) / name).rglob("*")):
                    if path.is_file():
                        archive.write(path, path.relative_to(Path(scratch) / name))


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        _rank_main(Path(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1] == "--golden":
        _make_golden(sys.argv[2:] or list(KINDS))
    else:
        make(Path(sys.argv[1]), sys.argv[2:] or list(KINDS))
