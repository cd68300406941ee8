"""What users do to a pipeline that its builders did not think of, against the plain loop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sheer
import sheer.testing
from sheer import LayerSpec
from sheer.cli.demo.launch import free_port
from sheer.errors import DataError, UsageError
from tests.engine.models import batches
from tests.engine.oracle import Case
from tests.engine.stages import (
    CLOSE,
    WIDTH,
    assert_same_as_whole,
    assert_trains_as_plain,
    case_of,
    cross_entropy,
    layers,
    staged,
    whole,
)


def start(case: Case, module: nn.Module, *, optimizer: Any = None, **more: Any) -> Any:
    return sheer.initialize(model=module, optimizer=optimizer, config=case.config(**more))[0]


# --- between stages ---------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Hands on a buffer of its own, which its next forward overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        return x, self.count


def times(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return pair[0] * pair[1]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-v"])
def test_what_a_layer_overwrites_later_travels_as_it_was(schedule: str) -> None:
    """Also between two chunks of one stage, where nothing travels."""
    model = [layers()[0], LayerSpec(Counts), times, *layers()[1:]]
    case = case_of(2, accumulation=4)
    v = {"chunks": 2, "placement": "v", "boundaries": [0, 1, 2, 3, len(model)]}
    loop = {"boundaries": [0, 2, len(model)]}
    module = staged(2, layers=model, **(v if schedule == "zb-v" else loop))
    engine = start(case, module, pipeline={"schedule": schedule})
    assert_trains_as_plain(engine, case, module=whole(layers=model))


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
@pytest.mark.parametrize("bad", [0, 1])
def test_data_that_raises_on_one_stage_leaves_nothing_behind(bad: int) -> None:
    """One stage has taken less than the other then; the next step begins with whole micro-batches all the same."""
    case = case_of(2, accumulation=3)
    engine = start(case, staged(2))

    def breaks() -> Iterator[Any]:
        yield from [(batch, batch) for batch in batches(2 if sheer.testing.rank() == bad else 3, size=2, seed=9)]
        raise KeyError("sample 17")

    with pytest.raises(DataError, match=f"rank {bad}: KeyError: 'sample 17'") as caught:
        engine.train_batch(breaks())
    assert isinstance(caught.value.__cause__, KeyError) is (sheer.testing.rank() == bad)
    assert_trains_as_plain(engine, case)


class Hands(nn.Module):
    """Returns what nobody can send."""

    def forward(self, x: torch.Tensor) -> Any:
        return x, lambda: x


@pytest.mark.world_size(2)
def test_outputs_that_cannot_be_handed_out_are_refused_on_all_stages() -> None:
    engine = start(case_of(2), staged(2, layers=[*layers(), LayerSpec(Hands)]))
    mine = [(batch, batch) for batch in batches(1, size=2)]
    with pytest.raises(DataError, match=r"the output of micro-batch 0\[1\] is a builtins.function"):
        engine.eval_batch(iter(mine), compute_loss=False)
    for count in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match=f"num_micro_batches is {count!r}"):
            engine.eval_batch(iter(mine), num_micro_batches=count)


# --- optimizers and schedules -----------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
@pytest.mark.parametrize("nothing", ["frozen", "empty"])
def test_an_optimizer_function_on_a_stage_with_nothing_to_train(nothing: str) -> None:
    """It sees what it sees elsewhere, a list of parameters, and may filter and group them."""

    def build(params: Any) -> torch.optim.Optimizer:
        params = [p for p in params if p.requires_grad]
        decayed, plain = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
        return torch.optim.Adagrad([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], weight_decay=0.1)

    model = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(3)]
    module = staged(2, layers=model, loss_fn=F.mse_loss, boundaries=[0, 3, 3] if nothing == "empty" else [0, 2, 3])
    if nothing == "frozen" and module.is_last:
        module.requires_grad_(False)
    engine = start(case_of(2), module, optimizer=build)
    expected = whole(layers=model, loss_fn=F.mse_loss)
    if nothing == "frozen":
        expected.get_submodule("2").requires_grad_(False)
    optimizer = build(expected.parameters())
    x, y = torch.randn(2, 2, WIDTH)
    engine.train_batch(iter([(x, y)]))
    F.mse_loss(expected(x), y).backward()
    optimizer.step()
    assert_same_as_whole(engine.module, expected, **CLOSE)


@pytest.mark.world_size(2)
def test_groups_are_the_same_on_all_stages() -> None:
    """Else a checkpoint would keep those of the first stage, and give them to the others."""
    module = staged(2)
    with pytest.raises(UsageError, match=r"group 0 has lr=1.5 on rank 1 and 0.5 on rank 0"):
        start(case_of(2), module, optimizer=torch.optim.SGD(module.parameters(), lr=0.5 + module.stage))
    more = [{"params": []}] if module.is_last else []
    with pytest.raises(UsageError, match=r"2 groups on rank 1 and 1 on rank 0"):
        start(case_of(2), module, optimizer=torch.optim.SGD([{"params": [*module.parameters()]}, *more], lr=0.5))


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("asked", "meant"), [("1F1B", "1f1b"), ("zero_bubble", "zero-bubble"), ("gpip", "gpipe")])
def test_a_misspelled_schedule_is_told_its_name(asked: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"'{asked}' is neither a name .* Did you mean '{meant}'"):
        start(case_of(2), staged(2), pipeline={"schedule": asked})


@pytest.mark.world_size(2)
def test_a_schedule_may_be_written_in_one_line_or_a_file(tmp_path) -> None:
    text = '{"stages": ["F0.0 F1 B0 B1", "F0 B0 F1 B1"]}'
    (tmp_path / "mine").write_text(text)
    case = case_of(2, accumulation=2)
    for asked in (text, str(tmp_path / "mine")):
        engine = start(case, staged(2, loss_fn=cross_entropy), pipeline={"schedule": asked})
        assert_trains_as_plain(engine, case)
        engine.destroy()


@pytest.mark.world_size(2)
def test_a_written_schedule_flushes_what_is_left_of_it() -> None:
    """Two of three micro-batches, in the order in which they are written."""
    text = "name: mine\nstage 0: F0 F1 F2 B0 B1 B2\nstage 1: F0 B0 F1 B1 F2 B2"
    case = case_of(2, accumulation=3)
    engine = start(case, staged(2, loss_fn=cross_entropy), pipeline={"schedule": text})
    (batch,) = batches(1, size=case.global_batch)
    mine = [(part, part) for part in batch[: 2 * case.micro].split(case.micro)]
    with pytest.raises(StopIteration, match="2 of 3"):
        engine.train_batch(iter(mine))
    assert engine.flush().micro_batches == 2
    expected = whole()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for part, _ in mine:
        (cross_entropy(expected(part), part) / 2).backward()
    optimizer.step()
    assert_same_as_whole(engine.module, expected, **CLOSE)
    engine.set_train_batch_size(4 * case.micro)
    with pytest.raises(UsageError, match="is for 3 micro-batches, this step has 4"):
        engine.train_batch(iter([*mine, *mine]))


@pytest.mark.world_size(2)
def test_chunks_placed_there_and_back_need_no_name_of_a_schedule() -> None:
    case = case_of(2, accumulation=3)
    engine = start(case, staged(2, chunks=2, placement="v"))
    assert_trains_as_plain(engine, case)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("asked", ["forward-only", "stage 0: F0\nstage 1: F0"])
def test_a_schedule_without_backwards_is_no_schedule_of_a_step(asked: str) -> None:
    with pytest.raises(UsageError, match="has no backwards"):
        start(case_of(2), staged(2), pipeline={"schedule": asked})


DIES = """
import datetime, os, sys
import torch, torch._dynamo, torch.distributed as dist
from torch import nn
import sheer, sheer.setup
from sheer.errors import CommError

for rank in range(3):  # what is imported is imported once
    if os.fork() == 0:
        break
else:
    for _ in range(3):
        os.wait()
    sys.exit(0)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))


def layer(x):
    if rank == 2:
        os._exit(0)
    return x


module = sheer.PipelineModule(
    [nn.Linear(2, 2), nn.Linear(2, 2), layer], num_stages=3, loss_fn=nn.MSELoss(), boundaries=[0, 1, 2, 3]
)
config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine = sheer.initialize(model=module, config=config)[0]
with open(os.path.join(sys.argv[1], f"rank{rank}"), "w") as told:
    for _ in range(2):
        try:
            engine.train_batch(iter([(torch.zeros(1, 2), torch.zeros(1, 2))]))
        except CommError as error:
            print(error, file=told)
os.write(1, b"end\\n")
sys.stdin.read()
os._exit(0)
"""


def test_a_rank_that_dies_in_a_step_is_named_by_all(tmp_path) -> None:
    """Also by one who is no neighbour of it, while its neighbour lives on; long before anything times out."""
    (tmp_path / "dies.py").write_text(DIES)
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    ranks = subprocess.Popen(
        [sys.executable, tmp_path / "dies.py", tmp_path],
        env={**os.environ, **store},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert [ranks.stdout.readline() for _ in range(2)] == ["end\n"] * 2
    ranks.communicate(timeout=60)
    told = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    for text in told:
        assert text.startswith("rank(s) 2 of 3 are gone: no sign of life within 5 s")
        assert "an earlier step has lost a rank" in text
    assert "(with rank 2) did not complete" in told[1]
    assert "noticed first by rank 1" in told[0]
