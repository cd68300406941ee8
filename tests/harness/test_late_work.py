"""The harness must catch each seeded bug and accept the correct code beside it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sheer.testing import rank
from tests.harness.late_work import Launch, LeaseViolation, late_collectives

pytestmark = pytest.mark.world_size(2)


def ramp(n: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(n, dtype=dtype) + rank()


# -- correct code ------------------------------------------------------------------------------------------------------


def test_results_are_those_of_the_real_collectives(world_size):
    full, mine = torch.empty(8), torch.full((4,), float(rank()))
    shard, spread = torch.empty(4), torch.empty(8)
    summed, sent = ramp(), ramp()
    with late_collectives() as late:
        works = [
            dist.all_gather_single(full, mine, async_op=True),
            dist.reduce_scatter_single(shard, ramp(), async_op=True),
            dist.all_reduce(summed, async_op=True),
            dist.broadcast(sent, src=1, async_op=True),
            dist.all_to_all_single(spread, ramp(), async_op=True),
        ]
        assert len(late.in_flight) == 5
        for work in works:
            assert not work.is_completed()
            work.wait()
            assert work.is_completed()
        assert late.in_flight == []
    assert full.tolist() == [0.0] * 4 + [1.0] * 4
    total = torch.arange(8) * 2 + 1
    assert torch.equal(shard, total[4 * rank() : 4 * rank() + 4].float())
    assert torch.equal(summed, total.float())
    assert torch.equal(sent, torch.arange(8) + 1.0)
    mine = torch.arange(4.0) + 4 * rank()
    assert torch.equal(spread, torch.cat([mine, mine + 1]))


def test_in_place_forms(world_size):
    """The output may be a part of the input, or the other way round."""
    scattered, gathered = ramp(), torch.zeros(8)
    own = slice(4 * rank(), 4 * rank() + 4)
    gathered[own] = rank() + 1.0
    with late_collectives():
        scatter = dist.reduce_scatter_single(scattered[own], scattered, async_op=True)
        gather = dist.all_gather_single(gathered, gathered[own], async_op=True)
        gather.wait()
        scatter.wait()
    assert torch.equal(scattered[own], (torch.arange(8) * 2 + 1.0)[own])
    assert gathered.tolist() == [1.0] * 4 + [2.0] * 4


def test_what_is_only_sent_may_be_read_in_flight(world_size):
    """A broadcast's source, and a rank's own part of a gather in place."""
    sent, gathered = ramp(), torch.zeros(8)
    own = gathered[4 * rank() : 4 * rank() + 4]
    own.fill_(rank() + 1.0)
    with late_collectives():
        works = [dist.broadcast(sent, group_src=0, async_op=True), dist.all_gather_single(gathered, own, async_op=True)]
        assert bool(sent.isnan().any()) == (rank() != 0)
        assert own.tolist() == [rank() + 1.0] * 4
        assert gathered.isnan().sum() == 4
        for work in works:
            work.wait()
    assert torch.equal(sent, torch.arange(8.0))


def test_ranks_may_wait_in_different_orders(world_size):
    other = dist.new_group([0, 1])
    a, b = ramp(), ramp()
    with late_collectives():
        works = [dist.all_reduce(a, async_op=True), dist.all_reduce(b, group=other, async_op=True)]
        for work in works if rank() == 0 else reversed(works):
            work.wait()
    assert torch.equal(a, torch.arange(8) * 2 + 1.0)
    assert torch.equal(b, a)


def test_synchronous_collectives_pass_through(world_size):
    t = ramp()
    with late_collectives() as late:
        dist.all_reduce(t)
    assert torch.equal(t, torch.arange(8) * 2 + 1.0)
    assert late.log == []


def test_the_log_is_in_launch_order(world_size):
    alone = [dist.new_group([each]) for each in (0, 1)][rank()]
    with late_collectives() as late:
        first = dist.all_reduce(ramp(5), async_op=True)
        second = dist.all_reduce(ramp(3, torch.float64), group=alone, async_op=True)
        second.wait()
        first.wait()
    assert late.log == [
        Launch("all_reduce", 5, torch.float32, (0, 1)),
        Launch("all_reduce", 3, torch.float64, (rank(),)),
    ]


def test_everything_is_put_back(world_size):
    before = dist.all_reduce
    replaced = []

    def fail():
        with late_collectives():
            replaced.append(dist.all_reduce)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert replaced[0] is not before
    assert dist.all_reduce is before


def test_autograd_does_not_notice(world_size):
    weight = torch.ones(2, requires_grad=True)
    buffer = torch.ones(2)
    with late_collectives():
        loss = (weight * buffer).sum()
        buffer_in_flight = dist.broadcast(buffer, src=0, async_op=True)
        buffer_in_flight.wait()
        loss.backward()
    assert weight.grad.tolist() == [1.0, 1.0]


# -- seeded bugs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_read_before_wait_sees_poison(world_size, dtype):
    full = torch.zeros(8, dtype=dtype)
    with late_collectives():
        work = dist.all_gather_single(full, ramp(4, dtype), async_op=True)
        early = full.clone()
        work.wait()
    if dtype.is_floating_point:
        assert early.isnan().all()
    else:
        assert (early == torch.iinfo(dtype).max).all()


def test_waiting_on_the_later_one_does_not_finish_the_earlier(world_size):
    a, b = ramp(), ramp()
    with late_collectives():
        first, last = dist.all_reduce(a, async_op=True), dist.all_reduce(b, async_op=True)
        last.wait()
        assert not b.isnan().any()
        assert a.isnan().all()
        first.wait()


def in_flight_bug(bug):
    """Run `bug` between launch and wait of a reduce-scatter."""
    shard, full = torch.empty(4), ramp()
    with late_collectives():
        work = dist.reduce_scatter_single(shard, full, async_op=True)
        bug(shard, full)
        work.wait()


def resize(tensor: torch.Tensor, nbytes: int) -> None:
    tensor.untyped_storage().resize_(nbytes)


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (lambda shard, full: full.zero_(), "its input was written"),
        (lambda shard, full: full[7:].add_(1), "its input was written"),
        (lambda shard, full: full.view(2, 4)[1, 3].fill_(9), "its input was written"),
        (lambda shard, full: shard.zero_(), "its output was written"),
        (lambda shard, full: resize(full, 0), "storage of its input was resized in flight, from 32 to 0 bytes"),
        (lambda shard, full: resize(shard, 0), "storage of its output was resized in flight, from 16 to 0 bytes"),
        (lambda shard, full: dist.all_reduce(full, async_op=True), "its input was written"),
        (lambda shard, full: dist.all_gather_single(full, torch.ones(4), async_op=True), "its input was written"),
    ],
    ids=["zeroed", "part", "view", "output", "freed-input", "freed-output", "reduced-twice", "reused"],
)
def test_a_touch_in_flight_is_caught(world_size, bug, words):
    with pytest.raises(LeaseViolation, match=words):
        in_flight_bug(bug)


def two_backwards(dtype):
    weight = torch.ones(4, requires_grad=True, dtype=dtype)
    loss = (weight * weight).sum()
    with late_collectives():
        loss.backward(retain_graph=True)
        work = dist.all_reduce(weight.grad, async_op=True)
        loss.backward()
        work.wait()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_second_backward_into_a_buffer_under_reduction_is_caught(world_size, dtype):
    """Which adds to NaN and leaves NaN."""
    with pytest.raises(LeaseViolation, match="all_reduce: its output was written in flight"):
        two_backwards(dtype)


def forgotten_wait():
    with late_collectives():
        dist.all_reduce(ramp(), async_op=True).wait()
        dist.broadcast(ramp(), src=0, async_op=True)


def test_a_forgotten_wait_is_caught(world_size):
    with pytest.raises(LeaseViolation, match="never waited on: broadcast"):
        forgotten_wait()
