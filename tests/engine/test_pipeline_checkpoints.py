"""What any split saves any other goes on from, and a run without a pipeline; under the names of the whole model."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import sheer
import sheer.testing
from sheer import PipelineModule, checkpoint
from sheer.errors import CheckpointError
from tests.engine.models import batches
from tests.engine.oracle import Case
from tests.engine.stages import SGD, case_of, cross_entropy, layers, staged, train
from tests.engine.worlds import Worlds, assert_same, contents, snapshot
from tests.pipeline.models import Language

ALL = 12


class Run(NamedTuple):
    """One way to hold the model."""

    stages: int
    width: int = 1
    zero: int = 0
    more: dict[str, Any] = {}

    @property
    def ranks(self) -> int:
        return self.stages * self.width


RUNS = {
    "one rank": Run(1),
    "zero 2 on two": Run(1, 2, 2),
    "zero 1 on three": Run(1, 3, 1),
    "two by two": Run(2, 2, 2),
    "two uneven": Run(2, 2, 0, {"boundaries": [0, 1, 8]}),
    "four stages": Run(4),
    "four, one empty": Run(4, 1, 1, {"boundaries": [0, 4, 4, 7, 8]}),
    "zero 3 in chunks": Run(2, 2, 3, {"chunks": 2}),
}


def start(run: Run, *, seed: int = 3, **more: Any) -> tuple[Any, Case]:
    rank = sheer.testing.rank()
    case = Case(stage=run.zero, world=run.width, rank=rank % run.width, micro=ALL // run.width, extra={**SGD, **more})
    module = staged(run.stages, stage=rank // run.width, **run.more)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(seed - 3)
    return sheer.initialize(model=module, config=case.config())[0], case


@pytest.mark.world_size(4, timeout=120)
def test_every_split_reads_what_any_other_saved(tmp_path, monkeypatch) -> None:
    """To the bit, and goes on alike: params, momentum, buffers; each of them stored once. All save, then all load what
    two others saved."""
    worlds, (first, second, third) = Worlds(monkeypatch), batches(3, size=ALL)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no power will fail; a hundred saves wait for the disk otherwise

    def save(saver: str) -> float:
        engine, case = start(RUNS[saver])
        train(engine, case, [first, second])
        engine.save_checkpoint(tmp_path, tag=saver, client_state={"by": saver})
        loss = train(engine, case, [third])[0].loss
        engine.destroy()
        return loss

    def load(loader: str, savers: list[str]) -> None:
        engine, case = start(RUNS[loader], seed=9)
        for saver in savers:
            path, client_state = engine.load_checkpoint(tmp_path, tag=saver)
            assert path is not None
            assert client_state == {"by": saver}
            assert engine.global_steps == 2
            engine.save_checkpoint(tmp_path, tag=f"{saver} by {loader}")
            loss = train(engine, case, [third])[0].loss
            if sheer.testing.rank() == 0:
                assert loss == pytest.approx(expected[saver], rel=1e-5), (saver, loader)
        engine.destroy()

    expected = {saver: worlds.within(RUNS[saver].ranks, partial(save, saver)) for saver in RUNS}
    names = {name for name, _ in staged(1, stage=0).named_parameters()}
    for number, loader in enumerate(RUNS):
        savers = [list(RUNS)[(number + step) % len(RUNS)] for step in (1, 3)]
        worlds.within(RUNS[loader].ranks, partial(load, loader, savers))
        for saver in savers[sheer.testing.rank() :: 4]:  # each rank compares its part
            stored = contents(tmp_path / saver)
            assert {key.name for key in stored if key.kind == "param"} == names
            assert_same(contents(tmp_path / f"{saver} by {loader}"), stored)


@pytest.mark.world_size(2, 3)
def test_two_and_three_stages_and_a_plain_run_read_each_other(world_size: int, tmp_path) -> None:
    first, second, third = batches(3, size=ALL)
    runs = [Run(world_size), Run(1, world_size, 3), Run(world_size, 1, 1)]
    losses = []
    for number, run in enumerate(runs):
        engine, case = start(run, seed=3 + number)
        if number == 0:
            train(engine, case, [first, second])
        else:
            engine.load_checkpoint(tmp_path, tag=f"{number - 1}")
        engine.save_checkpoint(tmp_path, tag=f"{number}")
        losses += [step.loss for step in train(engine, case, [third])]
        engine.destroy()
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)
    assert_same(contents(tmp_path / "1"), contents(tmp_path / "0"))
    assert_same(contents(tmp_path / "2"), contents(tmp_path / "0"))


@pytest.mark.world_size(2)
def test_a_plain_run_and_its_pipeline_read_each_other(tmp_path) -> None:
    """A model cut at its blocks keeps its own names; nothing says which of the two saved."""
    case, extra = case_of(2), SGD
    torch.manual_seed(0)
    model = Language()
    plain = sheer.initialize(model=model, config=Case(world=2, stage=1, extra=extra).config())[0]
    tokens = torch.arange(12).view(2, 6) % 11
    plain.backward(plain(tokens, tokens))
    plain.step()
    plain.save_checkpoint(tmp_path / "plain")
    plain.destroy()
    torch.manual_seed(1)
    cut = PipelineModule.from_module(Language(), blocks="body.blocks.*", num_stages=2)
    engine = sheer.initialize(model=cut, config=case.config())[0]
    engine.load_checkpoint(tmp_path / "plain")
    engine.save_checkpoint(tmp_path / "cut")
    assert_same(contents(tmp_path / "cut" / "global_step1"), contents(tmp_path / "plain" / "global_step1"))
    engine.train_batch(iter([(tokens, tokens)]))
    engine.save_checkpoint(tmp_path / "cut")
    engine.destroy()
    again = sheer.initialize(model=Language(), config=Case(world=2, stage=2, extra=extra).config())[0]
    again.load_checkpoint(tmp_path / "cut")
    assert again.global_steps == 2
    again.save_checkpoint(tmp_path / "plain")
    assert_same(contents(tmp_path / "cut" / "global_step2"), contents(tmp_path / "plain" / "global_step2"))


@pytest.mark.world_size(4)
def test_every_rank_writes_its_own_part_once(tmp_path) -> None:
    engine = sheer.initialize(model=staged(2), config=case_of(2, stage=1).config())[0]
    case = case_of(2, stage=1)
    train(engine, case, batches(1, size=case.global_batch))
    engine.save_checkpoint(tmp_path, tag="t")
    index = checkpoint.open_checkpoint(tmp_path, "t")
    files = sorted((tmp_path / "t").glob("rank*.safetensors"))
    assert len(files) == 4
    whole = sum(entry.nbytes for _, entry in index.entries())
    assert whole <= sum(file.stat().st_size for file in files) + 64 * len(list(index.entries()))
    assert sum(file.stat().st_size for file in files) < whole + 4 * 8192
    assert index.facts["run"]["pipeline_stages"] == 2
    assert index.ties == {"7.weight": "0.weight"}
    assert json.loads((tmp_path / "t" / "state.json").read_text())["counters"]["global_steps"] == 1


@pytest.mark.world_size(2)
def test_names_are_checked_over_all_stages_together(tmp_path) -> None:
    """A tensor that no stage has, or that the checkpoint lacks, is refused on all ranks, and nothing changes."""
    case = case_of(2)
    engine = sheer.initialize(model=staged(2), config=case.config())[0]
    train(engine, case, batches(1, size=case.global_batch))
    engine.save_checkpoint(tmp_path, tag="t")
    engine.destroy()
    more = [*layers()[:-1], nn.Linear(12, 12), layers()[-1]]
    other = sheer.initialize(model=staged(2, layers=more, loss_fn=cross_entropy), config=case.config())[0]
    before = snapshot(other)
    with pytest.raises(CheckpointError, match=r"7\.bias"):
        other.load_checkpoint(tmp_path, tag="t")
    assert_same(snapshot(other), before)


@pytest.mark.world_size(2)
def test_a_run_goes_on_from_its_loaders_position(tmp_path) -> None:
    """Its own loader deals the same samples to the first and the last stage; a load puts both where the save was."""
    data = [(tokens, tokens) for tokens in batches(1, size=16)[0]]

    def build() -> Any:
        return sheer.initialize(model=staged(2), config=case_of(2, accumulation=2).config(), training_data=data)[0]

    engine = build()
    for _ in range(2):
        engine.train_batch()
    engine.save_checkpoint(tmp_path)
    expected = [engine.train_batch().item() for _ in range(3)]
    engine.destroy()
    again = build()
    again.load_checkpoint(tmp_path)
    assert [again.train_batch().item() for _ in range(3)] == expected
