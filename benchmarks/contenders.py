"""Who is measured: each contender gives a function that trains one step on a list of micro-batches.

Each is written as its own documentation writes it. All run torch's fused AdamW with the same hyper-parameters and clip
the global norm at 1.0. A contender lives in processes of its own (see worker.py), with its own environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.workloads import CLIP, LEARNING_RATE, Batch, blocks_of

Step = Callable[[list[Batch]], torch.Tensor]


class Job(NamedTuple):
    """What a contender is asked to train."""

    model: nn.Module
    compiled: bool
    accumulation: int
    config: Mapping[str, Any] = {}
    """More of the JSON config, for who has one."""


class Trainer(NamedTuple):
    """A step, which returns this rank's mean loss, and how to let go of what it holds."""

    step: Step
    close: Callable[[], None] = lambda: None
    engine: Any = None
    """Ours only: for what other suites ask of it."""


class Contender(NamedTuple):
    """One row of a table."""

    build: Callable[[Job], Trainer]
    note: str
    package: str = "torch"
    environment: Mapping[str, str] = {}
    communicates: bool = True
    ours: bool = False
    quick: bool = True
    """Whether it takes part in `--quick`."""

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def _compile_blocks(job: Job) -> None:
    """By hand, what a user of plain PyTorch would do."""
    if job.compiled:
        for block in blocks_of(job.model):
            block.compile()


def _train(call: Callable[..., torch.Tensor], batch: Batch, accumulation: int) -> torch.Tensor:
    loss = call(*batch) / accumulation if accumulation > 1 else call(*batch)
    loss.backward()
    return loss.detach()


# --- plain PyTorch ----------------------------------------------------------------------------------------------------


def raw(job: Job) -> Trainer:
    _compile_blocks(job)
    optimizer = adamw(job.model.parameters())

    def step(batches: list[Batch]) -> torch.Tensor:
        loss = sum(_train(job.model, batch, job.accumulation) for batch in batches)
        nn.utils.clip_grad_norm_(job.model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Trainer(step)


def ddp(job: Job) -> Trainer:
    _compile_blocks(job)
    module = nn.parallel.DistributedDataParallel(job.model, gradient_as_bucket_view=True)
    optimizer = adamw(job.model.parameters())

    def step(batches: list[Batch]) -> torch.Tensor:
        loss: Any = 0
        with module.no_sync():
            loss = sum((_train(module, batch, job.accumulation) for batch in batches[:-1]), loss)
        loss = loss + _train(module, batches[-1], job.accumulation)
        nn.utils.clip_grad_norm_(job.model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Trainer(step)


def fsdp2(*, reshard: bool) -> Callable[[Job], Trainer]:
    def build(job: Job) -> Trainer:
        from torch.distributed.fsdp import fully_shard

        _compile_blocks(job)
        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in blocks_of(job.model):
            if block is not job.model:
                fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        module: Any = fully_shard(job.model, mesh=mesh, reshard_after_forward=reshard)
        optimizer = adamw(module.parameters())

        def step(batches: list[Batch]) -> torch.Tensor:
            loss: Any = 0
            for batch in batches:
                module.set_requires_gradient_sync(batch is batches[-1])
                loss = loss + _train(module, batch, job.accumulation)
            nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return Trainer(step)

    return build


# --- peers ------------------------------------------------------------------------------------------------------------


def accelerate(job: Job) -> Trainer:
    from accelerate import Accelerator

    _compile_blocks(job)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulation)
    module, optimizer = accelerator.prepare(job.model, adamw(job.model.parameters()))

    def step(batches: list[Batch]) -> torch.Tensor:
        total: Any = 0
        for batch in batches:
            with accelerator.accumulate(module):
                loss = module(*batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            total = total + loss.detach() / job.accumulation
        return total

    return Trainer(step, accelerator.free_memory)


def fabric(job: Job) -> Trainer:
    from lightning_fabric import Fabric

    _compile_blocks(job)
    ranks = torch.distributed.get_world_size()
    runner = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    runner.launch()
    module, optimizer = runner.setup(job.model, adamw(job.model.parameters()))

    def step(batches: list[Batch]) -> torch.Tensor:
        total: Any = 0
        for batch in batches:
            with runner.no_backward_sync(module, enabled=batch is not batches[-1]):
                loss = module(*batch) / job.accumulation
                runner.backward(loss)
            total = total + loss.detach()
        runner.clip_gradients(module, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Trainer(step)


def deepspeed(stage: int) -> Callable[[Job], Trainer]:
    def build(job: Job) -> Trainer:
        import deepspeed

        _compile_blocks(job)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": job.accumulation,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": CLIP,
            "steps_per_print": 10**9,
            **_merged({"stage": stage}, job),
        }
        optimizer = adamw(job.model.parameters())
        engine, *_ = deepspeed.initialize(model=job.model, optimizer=optimizer, config=config)
        return Trainer(_engine_step(engine, job), engine.destroy)

    return build


def _merged(zero: dict[str, Any], job: Job) -> dict[str, Any]:
    return {**job.config, "zero_optimization": {**zero, **job.config.get("zero_optimization", {})}}


def _engine_step(engine: Any, job: Job) -> Step:
    """The verbs that DeepSpeed and we share."""

    def step(batches: list[Batch]) -> torch.Tensor:
        total: Any = 0
        for batch in batches:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            total = total + loss.detach() / job.accumulation
        return total

    return step


def ours(stage: int) -> Callable[[Job], Trainer]:
    def build(job: Job) -> Trainer:
        import sheer

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": job.accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "gradient_clipping": CLIP,
            "compile": {"enabled": job.compiled},
            **_merged({"stage": stage}, job),
        }
        engine = sheer.initialize(model=job.model, config=config)[0]
        return Trainer(_engine_step(engine, job), engine.destroy, engine)

    return build


# --- the registry -----------------------------------------------------------------------------------------------------

RAW = "raw loop, no communication"
_DEEPSPEED = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}
OUR_STAGES = (0, 1, 2, 3)

CONTENDERS: dict[str, Contender] = {
    RAW: Contender(raw, "torch.optim.AdamW(fused=True), clip_grad_norm_", communicates=False),
    "DDP": Contender(ddp, "as the raw loop; gradient_as_bucket_view"),
    "FSDP2": Contender(fsdp2(reshard=False), "each block and the root; fused AdamW on DTensors"),
    "FSDP2, resharding": Contender(fsdp2(reshard=True), "reshard_after_forward; gathers twice", quick=False),
    "Accelerate": Contender(accelerate, "its DDP; fused AdamW", package="accelerate", quick=False),
    "Fabric": Contender(fabric, "strategy ddp; fused AdamW", package="lightning_fabric", quick=False),
    **{
        f"DeepSpeed stage {stage}": Contender(
            deepspeed(stage), "fused AdamW given", package="deepspeed", environment=_DEEPSPEED, quick=stage == 1
        )
        for stage in (0, 1, 2, 3)
    },
    **{f"Sheer stage {stage}": Contender(ours(stage), "fused AdamW by its config", ours=True) for stage in OUR_STAGES},
}


def chosen(only: Iterable[str], *, quick: bool, ranks: int) -> list[str]:
    """Names of the contenders that take part; the raw loop always does."""
    parts = list(only)
    names = [name for name, one in CONTENDERS.items() if one.quick or not quick]
    if ranks == 1:
        names = [name for name in names if not name.startswith(("DDP", "Accelerate", "Fabric"))]
    if parts:
        names = [name for name in CONTENDERS if name == RAW or any(part.lower() in name.lower() for part in parts)]
    return names


def environment(name: str, *, rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables of one rank's process: torchrun's, and the contender's own."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        **CONTENDERS[name].environment,
    }
