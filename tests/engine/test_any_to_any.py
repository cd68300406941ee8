"""Whatever saved a checkpoint, any other run goes on from it: to the bit in what is stored, alike in what it computes.

A save is made once and loaded by many: the first half of a table saves, the second half loads all of it.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import sheer.testing
from sheer import checkpoint, comm
from sheer.optim.lion import Lion
from sheer.utils import safe_get_full_fp32_param
from tests.engine.everything import LOW, PRECISIONS, build, train
from tests.engine.oracle import Case, values
from tests.engine.worlds import Worlds, contents

BATCH = 12
"""Samples per step, in worlds of 1 to 4."""
Tensors = dict[checkpoint.Key, torch.Tensor]


class Way(NamedTuple):
    """One way to train."""

    world: int
    stage: int
    precision: str = "fp32"
    accumulation: int = 1
    scope: str = ""
    """Of compilation; none where it is empty."""
    bucket: int = 600
    optim: str = "none"
    """Where masters and the optimizer's state rest."""
    param: str = "none"
    """Where sharded parameters do."""

    @property
    def case(self) -> Case:
        disk = {"nvme_path": tempfile.gettempdir()}
        extra: dict[str, Any] = {
            **PRECISIONS[self.precision],
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": self.bucket,
                "offload_optimizer": {"device": self.optim, **disk},
                "offload_param": {"device": self.param, **disk},
            },
        }
        if self.scope:
            extra["compile"] = {"enabled": True, "backend": "eager", "scope": self.scope}
        micro = BATCH // self.world // self.accumulation
        return Case(self.stage, self.world, sheer.testing.rank(), self.accumulation, micro, extra=extra)


# Over both lists: all pairs of worlds, of stages, of precisions and of places where state rests, accumulation and
# scopes of compilation.
SAVERS = [
    Way(1, 0, "fp32"),
    Way(2, 1, "bf16", scope="auto"),
    Way(3, 2, "fp16", accumulation=2, optim="cpu"),
    Way(4, 3, "fp32", accumulation=3, optim="nvme", param="cpu"),
]
LOADERS = [
    Way(4, 0, "bf16"),
    Way(3, 1, "fp32", bucket=200, optim="nvme"),
    Way(2, 2, "fp32", accumulation=3, optim="cpu"),
    Way(1, 3, "fp16", accumulation=2, param="nvme"),
    Way(4, 1, "fp16"),
    Way(1, 2, "fp32", scope="module"),
]


def drawn(count: int) -> list[Way]:
    """Others in each run of the tests, the same on all ranks. What fails names them."""
    chance = random.Random(comm.data_axis().broadcast_object(random.SystemRandom().random()))
    places = ["none", "cpu", "nvme"]
    runs = [(chance.randint(1, 4), chance.randint(0, 3)) for _ in range(count)]
    return [
        Way(
            world,
            stage,
            chance.choice(list(PRECISIONS)),
            chance.choice([n for n in (1, 2, 3) if BATCH // world % n == 0]),
            bucket=chance.choice([100, 600, 1 << 20]),
            optim=chance.choice(places),
            param=chance.choice(places) if stage == 3 else "none",
        )
        for world, stage in runs
    ]


class Saved(NamedTuple):
    """A checkpoint of the table, and how the run that saved it went on."""

    way: Way
    folder: Path
    losses: list[float]
    stored: Tensors
    """All of it, on the rank that compares."""


@pytest.mark.world_size(4, timeout=120)
def test_from_any_to_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds, others = Worlds(monkeypatch), drawn(2)
    monkeypatch.setattr(
        os, "fsync", lambda fd: None
    )  # no power will fail; most of the time is waiting for it otherwise
    saved = []
    for number, way in enumerate([*SAVERS, others[0]]):
        folder = tmp_path / f"{number}"
        losses = worlds.within(way.world, partial(_save_and_go_on, way, folder))
        stored = contents(folder / "first") if sheer.testing.rank() == 0 else {}
        saved.append(Saved(way, folder, comm.data_axis().broadcast_object(losses), stored))
    for way in [*LOADERS, *others[1:]]:
        worlds.within(way.world, partial(_load_each, way, saved))


def _save_and_go_on(way: Way, folder: Path) -> list[float]:
    case = way.case
    engine = build(1, case)
    train(engine, case, range(2))
    masters = {fqn: safe_get_full_fp32_param(p) for fqn, p in engine.module.named_parameters() if p.requires_grad}
    engine.save_checkpoint(folder, "first")
    if case.rank == 0:
        stored = contents(folder / "first")
        for fqn, value in masters.items():
            assert torch.equal(stored[checkpoint.Key("param", fqn)], value), (way, fqn)
    losses = [step.loss for step in train(engine, case, range(2, 4))]
    engine.destroy()
    return losses


def _load_each(way: Way, saved: Sequence[Saved]) -> None:
    """The first into a new engine, the others into one that has trained."""
    case = way.case
    engine = build(2, case)
    for number, one in enumerate(saved):
        engine.load_checkpoint(one.folder, "first")
        second = f"{number} by {way.world} {way.stage} {way.precision}"
        engine.save_checkpoint(one.folder, second, save_latest=False)
        assert engine.global_steps == 2
        shown = values(engine.module)
        if case.rank == 0:
            _compare(shown, one.stored, contents(one.folder / second), (one.way, way))
        if one.way.precision == way.precision:
            # In 8 or 11 bits the gradients are rounded apart at another world; the first loss is of equal weights.
            steps, near = (2, 1e-5) if way.precision == "fp32" else (1, 2**-8)
            losses = [step.loss for step in train(engine, case, range(2, 2 + steps))]
            assert losses == pytest.approx(one.losses[:steps], rel=near), (one.way, way)
    engine.destroy()


def _compare(shown: dict[str, torch.Tensor], first: Tensors, second: Tensors, ways: tuple[Way, Way]) -> None:
    """All that was saved came to the bit, and what the model computes with is it, rounded."""
    precision = ways[1].precision
    assert first.keys() == second.keys(), ways
    for key, value in first.items():
        if key.kind == "param" and key.name.startswith("frozen"):  # it has no master
            value = value.to(LOW.get(precision, torch.float32)).to(second[key].dtype)
        assert torch.equal(second[key], value.to(second[key].dtype)), (key, ways)
    for key in first:
        if key.kind == "param":
            assert torch.equal(shown[key.name], first[key].to(shown[key.name].dtype)), (key, ways)
    assert shown["island.weight"].dtype is torch.float32


# --- growing and shrinking --------------------------------------------------------------------------------------------


class Rows(torch.optim.Optimizer):
    """A user's own, with every form of state: a tensor like the parameter, one of another shape, a 0-d one, numbers."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group["lr"])

    def _update(self, param: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        state = self.state[param]
        if not state:
            rows = grad.shape[:1] if grad.dim() > 1 else (1,)
            state.update(trace=torch.zeros_like(param), rows=param.new_zeros(rows), step=torch.tensor(0.0), count=0)
        state["count"] += 1
        state["step"] += 1
        state["trace"].mul_(0.9).add_(grad)
        rows = grad.square().mean(dim=-1) if grad.dim() > 1 else grad.square().mean().reshape(1)
        state["rows"].mul_(0.9).add_(rows if rows.numel() == state["rows"].numel() else rows.mean())
        scale = state["rows"].mean().sqrt() + 1e-3 * state["step"] + state["count"] * 1e-4
        param.sub_(lr * state["trace"] / scale)


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
        (Lion, {}),
        (Rows, {}),
    ],
)
def test_growing_and_shrinking(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = Worlds(monkeypatch)

    def leg(world: int, number: int) -> list[float]:
        stage = 0 if cls is Rows else (number + 1) % 4  # it looks at more of a parameter than its own element
        case = Way(world, stage).case
        engine = build(number, case, cls=cls, **options)
        if number:
            engine.load_checkpoint(tmp_path)
        losses = [step.loss for step in train(engine, case, range(2 * number, 2 * number + 2))]
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        return losses

    chain = [worlds.within(world, partial(leg, world, number)) for number, world in enumerate((1, 4, 3, 2, 1))]
    case = Way(1, 0).case
    whole = worlds.within(1, lambda: train(build(0, case, cls=cls, **options), case, range(10)))
    if sheer.testing.rank() == 0:
        assert [loss for losses in chain for loss in losses] == pytest.approx([step.loss for step in whole], rel=1e-5)
