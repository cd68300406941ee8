"""The same order of actions as torch.distributed.pipelining's generators, wherever those have one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import schedules as torchs

from sheer.schedule import (
    GENERATORS,
    Kind,
    Schedule,
    by_name,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)

stages_of = st.integers(1, 8)
micro_batches_of = st.integers(1, 16)
few = settings(max_examples=50)
WORK = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


def pieces(stages: int, chunks: int) -> list[Any]:
    """What torch's generators ask of a rank's stages: numbers."""
    one = SimpleNamespace(num_stages=stages * chunks, group_size=stages, group_rank=0, submod=nn.Identity())
    return [one] * chunks


def theirs(order: dict[int, list[Any]]) -> list[list[str]]:
    """Torch's actions as text, `<virtual stage><kind><micro-batch>`, without its idle slots and reductions."""
    work = {str(kind.value) for kind in WORK}
    return [[str(one) for one in order[rank] if one and one.computation_type.value in work] for rank in sorted(order)]


def ours(schedule: Schedule) -> list[list[str]]:
    return [
        [f"{schedule.virtual(stage, a.chunk)}{a.kind.value}{a.micro_batch}" for a in actions if a.kind in WORK]
        for stage, actions in enumerate(schedule.actions)
    ]


def in_equal_rounds(stages: int, micro_batches: int) -> bool:
    """Whether torch takes them; ours also cuts unequal rounds."""
    return micro_batches % max(1, micro_batches // stages) == 0


@few
@given(stages_of, micro_batches_of)
def test_gpipe(stages: int, micro_batches: int) -> None:
    assert theirs(torchs.ScheduleGPipe(pieces(stages, 1)[0], micro_batches).pipeline_order) == ours(
        gpipe(stages, micro_batches)
    )


@few
@given(stages_of, micro_batches_of)
def test_1f1b(stages: int, micro_batches: int) -> None:
    assume(micro_batches >= stages)  # torch's class refuses to run fewer
    order = theirs(torchs.Schedule1F1B(pieces(stages, 1)[0], micro_batches).pipeline_order)
    mine = ours(one_f_one_b(stages, micro_batches))
    assert order[:-1] == mine[:-1]
    # The printed order of torch 2.13 counts the last stage's forwards from 1 (what it runs counts from 0).
    last = stages - 1
    assert order[-1] == [f"{last}F{int(a.split('F')[1]) + 1}" if "F" in a else a for a in mine[-1]]


@few
@given(stages_of, micro_batches_of, st.integers(2, 4))
def test_interleaved(stages: int, micro_batches: int, chunks: int) -> None:
    assume(in_equal_rounds(stages, micro_batches))
    schedule = torchs.ScheduleInterleaved1F1B(pieces(stages, chunks), micro_batches)
    assert theirs(schedule.pipeline_order) == ours(interleaved(stages, micro_batches, chunks))


@few
@given(stages_of, micro_batches_of, st.integers(1, 4))
def test_zero_bubble(stages: int, micro_batches: int, chunks: int) -> None:
    assume(in_equal_rounds(stages, micro_batches))
    schedule = torchs.ScheduleInterleavedZeroBubble(pieces(stages, chunks), micro_batches)
    assert theirs(schedule.pipeline_order) == ours(zero_bubble(stages, micro_batches, chunks))


@few
@given(stages_of, micro_batches_of)
def test_zero_bubble_v(stages: int, micro_batches: int) -> None:
    schedule = torchs.ScheduleZBVZeroBubble(pieces(stages, 2), micro_batches)
    assert theirs(schedule.pipeline_order) == ours(zero_bubble_v(stages, micro_batches))


@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "forward-only"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (3, 7), (4, 8), (8, 5)])
def test_torch_finds_ours_valid_and_free_of_deadlocks(name: str, stages: int, micro_batches: int) -> None:
    schedule = by_name(name, stages, micro_batches)
    actions = {rank: [torchs._Action.from_str(one) for one in some] for rank, some in enumerate(ours(schedule))}
    placement = torchs._validate_schedule(actions, stages, len(schedule.placement), micro_batches)
    assert tuple(placement[v] for v in range(len(schedule.placement))) == schedule.placement
    torchs._add_send_recv(actions, lambda virtual: schedule.placement[virtual], len(schedule.placement))
