"""The detector must catch each seeded bug and find the correct code beside it clean."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness.stream_race import Race, Races, Stream, detect_races


@pytest.fixture
def fake_group() -> Iterator[None]:
    """A process group of 8 whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def pairs(races: Races) -> set[tuple[str, str]]:
    """Which operator raced with which earlier one."""
    return {(race.op, race.earlier_op) for race in races.found}


# -- a small engine: gather into a flat buffer on a lane, compute with views of it, reduce its gradient ---------------


class Engine:
    """Two blocks of 8 parameters. Each step that a GPU needs can be left out by name."""

    def __init__(self, races: Races, *, without: str = "") -> None:
        self.races, self.without = races, without
        self.lane = races.stream("lane")
        self.shard = torch.ones(2)
        self.full = torch.zeros(16)
        self.grad = torch.zeros(16)
        self.reduced = torch.zeros(2)

    def edge(self, name: str, waiting: Stream, other: Stream) -> None:
        if name != self.without:
            waiting.wait_stream(other)

    def gather(self) -> None:
        self.edge("submit gather", self.lane, self.races.default)
        with self.lane:
            dist.all_gather_single(self.full, self.shard)

    def compute(self) -> torch.Tensor:
        self.edge("wait gather", self.races.default, self.lane)
        first, second = self.full[:8].view(2, 4), self.full[8:]
        return (first.sum() * second).sum()

    def reduce(self) -> None:
        self.grad[:8].add_(1)
        self.grad[8:].add_(2)
        self.edge("submit reduce", self.lane, self.races.default)
        with self.lane:
            dist.reduce_scatter_single(self.reduced, self.grad)

    def update(self) -> None:
        self.edge("wait reduce", self.races.default, self.lane)
        self.shard.add_(self.reduced, alpha=-0.1)
        self.grad.zero_()

    def step(self) -> None:
        self.gather()
        self.compute()
        self.reduce()
        self.update()


def test_a_correct_engine_is_clean(fake_group):
    with detect_races() as races:
        engine = Engine(races)
        for _ in range(3):
            engine.step()
    assert races.found == []


@pytest.mark.parametrize(
    ("without", "caught"),
    [
        ("submit gather", ("c10d::_allgather_base_", "aten::add_")),  # gathers a shard that is being updated
        ("wait gather", ("aten::sum", "c10d::_allgather_base_")),  # computes with half of the weights
        ("submit reduce", ("c10d::_reduce_scatter_base_", "aten::add_")),  # sends gradients that are being written
        ("wait reduce", ("aten::zero_", "c10d::_reduce_scatter_base_")),  # overwrites gradients that are being sent
    ],
)
def test_each_missing_edge_is_caught(fake_group, without, caught):
    with detect_races() as races:
        engine = Engine(races, without=without)
        engine.step()
        engine.step()
    assert caught in pairs(races)


# -- the memory model -------------------------------------------------------------------------------------------------


def test_views_race_by_bytes_not_by_pointers():
    with detect_races() as races:
        flat, side = torch.zeros(16), races.stream("side")
        side.wait_stream(races.default)
        with side:
            flat[4:8].fill_(1)
        flat[8:].add_(1)  # beside it
        flat[:4].add_(1)
        assert races.found == []
        flat.view(2, 8)[0, 2:6].add_(1)  # across it
    assert [str(race) for race in races.found] == [
        "aten::add_ on stream compute is not ordered after aten::fill_ on stream side (bytes 16 to 24)"
    ]


def test_two_reads_do_not_race():
    with detect_races() as races:
        t, side = torch.ones(4), races.stream("side")
        side.wait_stream(races.default)
        with side:
            t.sum()
        t.sum()
    assert races.found == []


def test_taking_a_view_touches_nothing():
    with detect_races() as races:
        t, side = torch.ones(4), races.stream("side")
        with side:
            t.view(2, 2).t().unsqueeze(0).detach()
    assert races.found == []


def test_outputs_belong_to_the_stream_that_made_them():
    with detect_races() as races:
        side = races.stream("side")
        with side:
            made = torch.ones(4) * 2
        made.sum()
    assert ("aten::sum", "aten::mul") in pairs(races)


def test_a_buffer_freed_while_a_lane_uses_it_is_caught():
    """What `record_stream` is for: the allocator hands the memory out again in the allocating stream's order."""
    with detect_races() as races:
        buffer, side = torch.zeros(16), races.stream("side")
        side.wait_stream(races.default)
        with side:
            buffer.add_(1)
        del buffer
        races.default.wait_stream(side)  # too late
    assert pairs(races) == {("free", "aten::add_")}


def test_a_buffer_freed_after_the_lane_is_clean():
    with detect_races() as races:
        buffer, side = torch.zeros(16), races.stream("side")
        side.wait_stream(races.default)
        with side:
            buffer.add_(1)
        races.default.wait_stream(side)
        del buffer
    assert races.found == []


@pytest.mark.parametrize("waits", [True, False])
def test_resize_to_nothing_is_a_free(waits):
    with detect_races() as races:
        buffer, side = torch.zeros(16), races.stream("side")
        side.wait_stream(races.default)
        with side:
            buffer.sum()
        if waits:
            races.default.wait_stream(side)
        buffer.untyped_storage().resize_(0)
    assert pairs(races) == (set() if waits else {("free", "aten::sum")})


@pytest.mark.parametrize("waits", [True, False])
def test_memory_allocated_again_is_no_lanes_yet(waits):
    """A lane may write to a buffer only after the stream that allocated it: others may still use that memory."""
    with detect_races() as races:
        buffer, side = torch.zeros(16), races.stream("side")
        side.wait_stream(races.default)
        buffer.untyped_storage().resize_(0)
        buffer.untyped_storage().resize_(64)
        if waits:
            side.wait_stream(races.default)
        with side:
            buffer.fill_(1)
    assert pairs(races) == (set() if waits else {("aten::fill_", "allocation")})


# -- the order --------------------------------------------------------------------------------------------------------


def test_order_is_transitive():
    with detect_races() as races:
        a, b, t = races.stream("a"), races.stream("b"), torch.zeros(4)
        a.wait_stream(races.default)
        with a:
            t.add_(1)
        b.wait_stream(a)
        with b:
            t.add_(1)
        races.default.wait_stream(b)
        t.add_(1)
    assert races.found == []


def test_an_event_orders_only_what_was_recorded():
    with detect_races() as races:
        side, early, late = races.stream("side"), torch.zeros(4), torch.zeros(4)
        side.wait_stream(races.default)
        with side:
            early.add_(1)
            event = side.record_event()
            late.add_(1)
        event.wait()
        early.sum()
        assert races.found == []
        late.sum()
    assert pairs(races) == {("aten::sum", "aten::add_")}


def test_an_event_recorded_nowhere_orders_nothing():
    with detect_races() as races:
        side, t = races.stream("side"), torch.zeros(4)
        races.event().wait(side)
        with side:
            t.add_(1)
    assert pairs(races) == {("aten::add_", "allocation"), ("aten::add_", "aten::zeros")}


@pytest.mark.parametrize("how", ["stream", "event"])
def test_the_host_may_wait(how):
    with detect_races() as races:
        side, t = races.stream("side"), torch.zeros(4)
        side.wait_stream(races.default)
        with side:
            t.add_(1)
        (side if how == "stream" else side.record_event()).synchronize()
        t.sum()
        with races.stream("made afterwards"):
            t.sum()
    assert races.found == []


def test_the_current_stream_is_each_threads_own():
    with detect_races() as races:
        side, seen = races.stream("side"), []
        with side:
            thread = threading.Thread(target=lambda: seen.append(races.current_stream()))
            thread.start()
            thread.join()
            assert races.current_stream() is side
    assert seen == [races.default]


def test_backward_is_watched():
    with detect_races() as races:
        weight, side = torch.ones(4, requires_grad=True), races.stream("side")
        (weight * weight).sum().backward()
        with side:
            weight.grad.add_(1)
    assert any(race.op == "aten::add_" and race.stream == "side" for race in races.found)


def test_an_unknown_collective_is_refused(fake_group):
    with detect_races(), pytest.raises(NotImplementedError, match="does not know what c10d::gather_ reads and writes"):
        dist.gather(torch.ones(2), [torch.ones(2) for _ in range(8)])


def test_it_ends_with_the_block():
    resize = torch.UntypedStorage.resize_
    with detect_races() as races:
        side = races.stream("side")
    with side:
        torch.zeros(4).add_(1)
    assert torch.UntypedStorage.resize_ is resize
    assert races.found == []
    assert Race._fields == ("op", "stream", "earlier_op", "earlier_stream", "start", "stop")
