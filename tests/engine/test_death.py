"""A rank that dies, or raises and leaves, ends every other with its name, long before anything times out."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sheer.comm import bonds, destroy_process_group
from sheer.errors import CommError
from tests.engine.models import batches, odd
from tests.engine.oracle import Case, start
from tests.engine.stages import staged
from tests.harness import fresh

WORLD = 3
PATIENCE = 1.0


class Leaving(Exception):
    """Of a rank that raises, and leaves."""


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raising(*_: Any) -> None:
    raise Leaving


def arm(module: Any, where: str, how: Any) -> None:
    block = module.blocks[1]
    if where == "forward":
        block.register_forward_pre_hook(how)
    elif where == "backward":
        block.register_forward_hook(lambda _block, _args, out: out.register_hook(how) and None)
    else:
        register_optimizer_step_pre_hook(how)


def one_of_three(rank: int, stage: int, where: str, how: Any, doomed: int, result: Any) -> None:
    """Trains two steps; in the third the doomed one goes."""
    bonds.PATIENCE = PATIENCE
    case = Case(stage=stage, world=WORLD, rank=rank)
    module = odd()
    engine = start(module, case)
    (batch,) = batches(1, size=case.micro)
    try:
        for number in range(5):
            if number == 2 and rank == doomed:
                arm(module, where, how)
            engine.backward(engine(batch))
            engine.step()
        result.put(("finished", ""))
    except Leaving:
        destroy_process_group()
    except BaseException as error:
        result.put((type(error).__name__, str(error)))


@pytest.mark.parametrize(
    ("stage", "where", "how", "doomed"),
    [
        (3, "forward", killed, 1),
        (3, "forward", killed, 0),
        (3, "backward", killed, 2),
        (3, "step", killed, 1),
        (2, "backward", killed, 1),
        (0, "step", killed, 2),
        (3, "forward", raising, 2),
        (3, "backward", raising, 1),
        (2, "backward", raising, 0),
    ],
)
def test_who_dies_is_named_by_every_other(stage: int, where: str, how: Any, doomed: int) -> None:
    with fresh.ranks(one_of_three, WORLD, stage, where, how, doomed) as (ranks, results):
        told = [results[rank].get(timeout=20) for rank in range(WORLD) if rank != doomed]
        for rank in ranks:
            rank.join(timeout=60)
        ended = [rank.exitcode for rank in ranks]
    for kind, message in told:
        assert kind == CommError.__name__, message
        assert f"Of 3 ranks, {doomed} did not fail too within 1 s: look there." in message
    assert ended == [-signal.SIGKILL if how is killed and rank == doomed else 0 for rank in range(WORLD)]


def one_of_two_by_two(rank: int, doomed: int, result: Any) -> None:
    """Two stages of two; the doomed one goes in its update, where its data rank waits for it, and others for that."""
    bonds.PATIENCE = PATIENCE
    case = Case(stage=1, world=2, rank=rank % 2)
    engine = start(staged(2), case)
    (batch,) = batches(1, size=case.micro)
    try:
        for number in range(3):
            if number == 1 and rank == doomed:
                register_optimizer_step_pre_hook(killed)
            engine.train_batch(iter([(batch, batch)]))
        result.put(("finished", ""))
    except BaseException as error:
        result.put((type(error).__name__, str(error)))


def test_who_dies_is_named_in_other_stages_too() -> None:
    doomed = 3
    with fresh.ranks(one_of_two_by_two, 4, doomed) as (_, results):
        told = [results[rank].get(timeout=60) for rank in range(4) if rank != doomed]
    for kind, message in told:
        assert kind == CommError.__name__, message
        assert "Of 4 ranks, 3 did not fail too" in message or message.startswith("rank(s) 3 of 4 are gone")
