"""Lanes, tickets, arenas; errors of all ranks gathered; ranks that do not come."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sheer.comm import Arena, Axis, Lane, NativeTransport, build_mesh, data_axis
from sheer.errors import CheckpointError, CommError, UsageError


def axis() -> Axis:
    return data_axis()


@pytest.mark.world_size(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_collectives_do_what_they_say(dtype: torch.dtype) -> None:
    data = axis()
    lane = Lane(data)
    length = 128
    full = torch.arange(length * data.size, dtype=torch.float32).remainder(13).to(dtype) + data.rank
    expected = sum(
        torch.arange(length * data.size, dtype=torch.float32).remainder(13) + r for r in range(data.size)
    ).to(dtype)
    own = slice(data.rank * length, (data.rank + 1) * length)

    summed = full.clone()
    lane.all_reduce(summed, what="test").wait()
    assert torch.equal(summed, expected)

    scattered = full.clone()
    lane.reduce_scatter(scattered[own], scattered, what="test").wait()
    assert torch.equal(scattered[own], expected[own])

    apart = torch.empty(length, dtype=dtype)
    lane.reduce_scatter(apart, full.clone(), what="test").wait()
    assert torch.equal(apart, expected[own])

    for shard in (expected[own].clone(), None):
        gathered = torch.zeros_like(full)
        gathered[own] = expected[own]
        lane.all_gather(gathered, gathered[own] if shard is None else shard, what="test").wait()
        assert torch.equal(gathered, expected)


@pytest.mark.world_size(2)
def test_the_native_transport_does_the_same() -> None:
    """What NCCL would run; gloo has these calls too, though slower ones."""
    data = axis()
    assert data.group is not None
    native = NativeTransport(data.group)
    full = torch.arange(256.0) + data.rank
    shard, gathered = torch.empty(128), torch.empty(256)
    for work in native.reduce_scatter(shard, full)[0]:
        work.wait()
    for work in native.all_gather(gathered, shard)[0]:
        work.wait()
    assert torch.equal(gathered, 2 * torch.arange(256.0) + 1)


@pytest.mark.world_size(2)
def test_traffic_is_counted_by_theory() -> None:
    data = axis()
    lane = Lane(data)
    lane.counters.log = []
    buffer = torch.zeros(256)
    lane.all_reduce(buffer, what="a").wait()
    lane.reduce_scatter(buffer[:128], buffer, what="b").wait()
    lane.all_gather(buffer, buffer[data.rank * 128 :][:128], what="c").wait()
    assert dict(lane.counters.bytes) == {"all_reduce": 1024, "reduce_scatter": 512, "all_gather": 512}
    assert dict(lane.counters.collectives) == {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1}
    assert [(entry.op, entry.numel, entry.what) for entry in lane.counters.log] == [
        ("all_reduce", 256, "a"),
        ("reduce_scatter", 256, "b"),
        ("all_gather", 256, "c"),
    ]


@pytest.mark.world_size(2)
def test_a_ticket_runs_what_follows_once_and_lets_go() -> None:
    lane = Lane(axis())
    ran = []
    ticket = lane.all_reduce(torch.ones(4), what="test", then=lambda: ran.append(1))
    assert not ticket.done
    assert ran == []
    ticket.wait()
    ticket.wait()
    assert ticket.done
    assert ran == [1]
    assert ticket.held == ()


@pytest.mark.world_size(2)
def test_a_buffer_under_way_cannot_be_released() -> None:
    lane, arena = Lane(axis()), Arena(torch.device("cpu"))
    buffer = arena.acquire(64, torch.float32).zero_()
    ticket = lane.all_reduce(buffer, what="test")
    with pytest.raises(AssertionError, match="still held"):
        arena.release(buffer, after=ticket)
    ticket.wait()
    arena.release(buffer, after=ticket)
    assert arena.live == 0


def test_the_arena_reuses_and_counts() -> None:
    arena = Arena(torch.device("cpu"))
    first = arena.acquire(100, torch.float32)
    second = arena.acquire(100, torch.float32)
    assert (arena.live, arena.peak, arena.idle) == (800, 800, 0)
    address = first.data_ptr()
    arena.forget(first)
    assert arena.acquire(60, torch.float32).data_ptr() == address  # another size, as long as it fits well
    assert arena.acquire(10, torch.bfloat16).data_ptr() not in (address, second.data_ptr())
    assert (arena.live, arena.peak) == (660, 800)


@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=60))
def test_the_arena_keeps_at_most_twice_the_largest(requests: list[tuple[int, bool]]) -> None:
    arena = Arena(torch.device("cpu"))
    out: list[torch.Tensor] = []
    for numel, give_back in requests:
        buffer = arena.acquire(numel, torch.float32).fill_(numel)
        assert all(bool((other == other[0]).all()) for other in out)  # nobody else's memory was written
        assert buffer.data_ptr() % 256 == 0
        out.append(buffer)
        if give_back:
            arena.forget(out.pop(0))
        assert arena.live == sum(buffer.nbytes for buffer in out)
        assert arena.idle <= 2 * max(4 * number for number, _ in requests)
    for buffer in out:
        arena.forget(buffer)
    assert arena.live == 0
    arena.trim()
    assert arena.idle == 0


@pytest.mark.world_size(3)
def test_errors_of_all_ranks_become_one() -> None:
    data = axis()
    data.agree(None, doing="nothing")
    error = CheckpointError(f"disk of {data.rank} is full") if data.rank else None
    with pytest.raises(CheckpointError, match=r"saving failed on 2 of 3 ranks") as caught:
        data.agree(error, doing="saving")
    assert "rank 1: CheckpointError: disk of 1 is full" in str(caught.value)
    assert "rank 2: CheckpointError: disk of 2 is full" in str(caught.value)


@pytest.mark.world_size(2)
def test_the_same_error_everywhere_is_said_once() -> None:
    with pytest.raises(UsageError, match=r"^no such thing$"):
        axis().agree(UsageError("no such thing"), doing="anything")


@pytest.mark.world_size(2)
def test_a_foreign_error_is_a_communication_error() -> None:
    data = axis()
    with pytest.raises(CommError, match="rank 1: ZeroDivisionError: division by zero"):
        data.agree(ZeroDivisionError("division by zero") if data.rank else None, doing="dividing")


@pytest.mark.world_size(3)
def test_missing_ranks_are_named_and_the_run_goes_on() -> None:
    data = axis()
    if data.rank == 1:
        with pytest.raises(CommError, match=r"saving: rank 1 waited 0.5 s in vain for rank\(s\) 0, 2 of 3"):
            data.assemble("saving", timeout=0.5)
    data.barrier()
    data.assemble("saving", timeout=10)  # all of them now, whatever went before
    data.assemble("saving", timeout=10)
    assert data.gather_objects(data.rank) == [0, 1, 2]


@pytest.mark.world_size(2)
def test_objects_travel() -> None:
    data = axis()
    assert data.broadcast_object({"rank": data.rank}) == {"rank": 0}
    assert data.gather_objects((data.rank, None)) == [(0, None), (1, None)]
    tensor = torch.full((3,), float(data.rank))
    data.broadcast(tensor, source=1)
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_one_process_needs_no_group() -> None:
    data = axis()
    assert (data.rank, data.size, data.group) == (0, 1, None)
    assert data.gather_objects(5) == [5]
    data.assemble("anything", timeout=0.01)
    data.barrier()
    with pytest.raises(KeyError):
        data.agree(KeyError("own error"), doing="anything")


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sheer.comm import init_process_group

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="WORLD_SIZE=2 but no RANK"):
        init_process_group(torch.device("cpu"))


@pytest.mark.world_size(4)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_axis_of_a_mesh_joins_its_ranks_and_no_others(stages: int, world_size: int) -> None:
    """Rank = stage * D + data rank; a tie joins the holders of one column."""
    world = data_axis()
    ties = [(0, stages - 1), (0, 1, stages - 1)] if stages > 2 else [(0, 1)] if stages == 2 else []
    if world_size % stages:
        with pytest.raises(UsageError, match=f"{stages} pipeline stages cannot share {world_size} ranks"):
            build_mesh(world, stages=stages, ties=ties)
        return
    mesh, width = build_mesh(world, stages=stages, ties=ties), world_size // stages
    stage, column = divmod(world.rank, width)
    assert (mesh.stages, mesh.stage, mesh.data.rank, mesh.data.size) == (stages, stage, column, width)
    assert mesh.data.gather_objects(world.rank) == [stage * width + c for c in range(width)]
    assert mesh.pipe.gather_objects(world.rank) == [s * width + column for s in range(stages)]
    assert set(mesh.ties) == {holders for holders in ties if stage in holders}
    for holders, axis in mesh.ties.items():
        assert axis.gather_objects(world.rank) == [s * width + column for s in holders]
    assert (mesh.data is world) == (stages == 1)
    mesh.close()
