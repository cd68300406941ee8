"""The plan: properties that must hold for any parameters, world and limit."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sheer import layout
from sheer.layout import ALIGNMENT, STAGES, Collective, Interval, ParamSpec, Place, Placement

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def parameters(draw: st.DrawFn) -> list[ParamSpec]:
    count = draw(st.integers(0, 25))
    return [
        ParamSpec(f"p{i}", draw(SHAPES), draw(DTYPES), torch.float32, draw(st.sampled_from([None, 0, 1])))
        for i in range(count)
    ]


plans = st.builds(
    lambda specs, stage, world, limit: (
        specs,
        layout.plan(specs, stage=STAGES[stage], world=world, limit=limit),
        limit,
    ),
    parameters(),
    st.sampled_from([0, 1, 2, 3]),
    st.integers(1, 9),
    st.integers(1, 5000),
)


@given(plans)
def test_every_parameter_has_one_place(planned) -> None:
    specs, plan, _ = planned
    slots = [slot for bucket in plan.buckets for slot in bucket.slots]
    assert sorted(slot.fqn for slot in slots) == sorted(spec.fqn for spec in specs)
    shapes = {spec.fqn: spec.shape for spec in specs}
    assert all(slot.shape == shapes[slot.fqn] and slot.numel == prod(slot.shape) for slot in slots)


@given(plans)
def test_starts_are_aligned_and_slots_do_not_overlap(planned) -> None:
    _, plan, _ = planned
    for bucket in plan.buckets:
        assert all(slot.start % ALIGNMENT == 0 for slot in bucket.slots)
        ends = [0]
        for slot in bucket.slots:
            assert slot.start >= ends[-1]
            ends.append(slot.stop)
        assert ends[-1] <= bucket.numel


@given(plans)
def test_shards_are_equal_aligned_and_tile_the_bucket(planned) -> None:
    _, plan, _ = planned
    for bucket in plan.buckets:
        shards = [bucket.shard(rank) for rank in range(plan.world)]
        assert {shard.numel for shard in shards} == {bucket.numel // plan.world}
        assert shards[0].numel % ALIGNMENT == 0
        assert shards[0].numel > 0
        assert [shard.start for shard in shards] == [sum(s.numel for s in shards[:i]) for i in range(plan.world)]
        assert shards[-1].stop == bucket.numel


@given(plans)
def test_pieces_of_all_ranks_tile_every_parameter_once(planned) -> None:
    specs, plan, _ = planned
    found: dict[str, list[tuple[int, int]]] = {spec.fqn: [] for spec in specs}
    for bucket in plan.buckets:
        for rank in range(plan.world):
            for piece in bucket.pieces(bucket.shard(rank)):
                found[piece.fqn].append((piece.start, piece.stop))
                start = next(slot.start for slot in bucket.slots if slot.fqn == piece.fqn)
                assert piece.offset == start + piece.start
    for spec in specs:
        at = 0
        for start, stop in sorted(found[spec.fqn]):
            assert start == at
            at = stop
        assert at == spec.numel
        assert len(found[spec.fqn]) == 1 or spec.numel


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_parameter_without_elements_has_a_place_at_the_end_of_a_full_bucket(world: int) -> None:
    specs = [ParamSpec(n, s, torch.float32, torch.float32, 0) for n, s in (("none", (0, 5)), ("full", (ALIGNMENT,)))]
    (bucket,) = layout.plan(specs, stage=STAGES[0], world=world, limit=5000).buckets
    pieces = [piece.fqn for rank in range(world) for piece in bucket.pieces(bucket.shard(rank))]
    assert sorted(pieces) == ["full", "none"]


@given(plans)
def test_buckets_are_of_one_kind_and_bounded(planned) -> None:
    specs, plan, limit = planned
    by_name = {spec.fqn: spec for spec in specs}
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        specs_here = [by_name[slot.fqn] for slot in bucket.slots]
        assert {(s.dtype, s.grad_dtype, s.group, s.tie, s.unit, s.chunk) for s in specs_here} == {tuple(bucket.key)}
        used = sum(layout.align(slot.numel) for slot in bucket.slots)
        assert used <= limit or len([slot for slot in bucket.slots if slot.numel]) == 1
        assert bucket.numel < used + ALIGNMENT * plan.world or used == 0


@given(plans)
def test_launch_order_is_reverse_order_of_use(planned) -> None:
    specs, plan, _ = planned
    position = {spec.fqn: i for i, spec in enumerate(specs)}
    for bucket in plan.buckets:
        order = [position[slot.fqn] for slot in bucket.slots]
        assert order == sorted(order, reverse=True)
    complete = [min(position[slot.fqn] for slot in bucket.slots) for bucket in plan.buckets]
    assert complete == sorted(complete, reverse=True)


@given(parameters(), st.integers(1, 9), st.integers(1, 9))
def test_offsets_do_not_depend_on_the_world(specs, one, other) -> None:
    def offsets(world: int) -> list[tuple[layout.Slot, ...]]:
        return [b.slots for b in layout.plan(specs, stage=STAGES[1], world=world, limit=900).buckets]

    assert offsets(one) == offsets(other)


@given(plans)
def test_ranks_own_all_or_their_shard(planned) -> None:
    _, plan, _ = planned
    for bucket in plan.buckets:
        for rank in range(plan.world):
            whole = Interval(0, bucket.numel)
            sharded = plan.stage.optim is Placement.SHARDED
            assert plan.owned(bucket, rank) == (bucket.shard(rank) if sharded else whole)


@given(plans)
def test_plans_print_and_have_a_digest_of_their_own(planned) -> None:
    specs, plan, limit = planned
    again = layout.plan(specs, stage=plan.stage, world=plan.world, limit=limit)
    assert again == plan
    assert again.digest() == plan.digest()
    assert len(str(plan).splitlines()) == len(plan.buckets) + 2
    longer = [*specs, ParamSpec("new", (1,), torch.float32, torch.float32, 0)]
    other = layout.plan(longer, stage=plan.stage, world=plan.world, limit=limit)
    assert other.digest() != plan.digest()


def test_the_stage_table_gives_the_collectives() -> None:
    reduction = {stage: layout.change(row.grad, row.optim) for stage, row in STAGES.items()}
    assert reduction[0] is Collective.ALL_REDUCE
    assert reduction[1] is Collective.REDUCE_SCATTER
    assert reduction[2] is reduction[3] is Collective.NOTHING
    assert layout.change(Placement.PARTIAL, STAGES[2].grad) is Collective.REDUCE_SCATTER
    gather = {stage: layout.change(row.optim, row.param) for stage, row in STAGES.items()}
    assert gather == {
        0: Collective.NOTHING,
        1: Collective.ALL_GATHER,
        2: Collective.ALL_GATHER,
        3: Collective.NOTHING,
    }
    with pytest.raises(KeyError):
        layout.change(Placement.REPLICATED, Placement.PARTIAL)


@pytest.mark.parametrize(
    ("total", "upper", "expected"),
    [
        (100, 5 * 10**8, 2**20),
        (10**8, 5 * 10**8, 10**8 // 8),
        (10**10, 5 * 10**8, 40 * 10**6),
        (10**10, 1000, 1000),
        (10**13, 10**12, 40 * 10**6),
    ],
)
def test_bucket_limit(total: int, upper: int, expected: int) -> None:
    assert layout.bucket_limit(total, upper) == expected


def test_a_thousand_ranks_and_ten_thousand_parameters_can_be_planned() -> None:
    specs = [ParamSpec(f"layers.{i}.weight", (64, 33), torch.bfloat16, torch.float32, i % 2) for i in range(10_000)]
    plan = layout.plan(specs, stage=STAGES[2], world=1024, limit=10**6)
    assert sum(len(bucket.slots) for bucket in plan.buckets) == 10_000
    assert all(bucket.numel % (1024 * ALIGNMENT) == 0 for bucket in plan.buckets)


@given(*(st.integers(0, 30) for _ in range(4)))
def test_overlap(a: int, b: int, c: int, d: int) -> None:
    found = layout.overlap(Interval(a, b), Interval(c, d))
    expected = sorted(set(range(a, b)) & set(range(c, d)))
    assert list(range(*found)) == expected if found is not None else not expected


@given(parameters(), st.lists(parameters(), min_size=2, max_size=2), st.integers(1, 5), st.integers(1, 5000), st.data())
def test_stages_that_share_parameters_cut_them_alike(shared, others, world, limit, data) -> None:
    """Whatever else a stage holds, in whatever order: the shards of shared parameters are the same on all holders."""
    shared = [spec._replace(fqn=f"tied.{spec.fqn}", tie=(0, 3)) for spec in shared]
    cut = []
    for own in others:
        specs = data.draw(st.permutations([*shared, *own]))
        plan = layout.plan(specs, stage=STAGES[2], world=world, limit=limit)
        cut.append({(bucket.key, bucket.slots, bucket.numel) for bucket in plan.buckets if bucket.key.tie})
        assert all(bool(bucket.key.tie) == s.fqn.startswith("tied.") for bucket in plan.buckets for s in bucket.slots)
    assert cut[0] == cut[1]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_rank_keeps_and_where(stage: int, dtype: torch.dtype) -> None:
    """The ZeRO formula, in bytes per parameter, over 4 ranks; offload moves bytes and, in fp32, adds the copy that is
    updated."""
    specs = [ParamSpec("w", (4096,), dtype, torch.float32, 0)]
    row, width = STAGES[stage], dtype.itemsize
    for param in (Place.DEVICE, Place.FILES) if stage == 3 else (Place.DEVICE,):
        for optim in Place:
            at = layout.places(row, param=param, optim=optim)
            kept = layout.plan(specs, stage=row, world=4, limit=10**9, places=at).nbytes()
            apart = dtype is torch.bfloat16 or param is not optim
            assert kept["param"] == (param, 4096 * width // (4 if stage == 3 else 1))
            assert kept["grad"] == (at.grad, 4096 * 4 // (4 if stage >= 2 else 1))
            assert kept["master"] == (optim, apart * 4096 * 4 // (4 if stage >= 1 else 1))
            assert at.grad is (Place.HOST if stage >= 2 and optim is not Place.DEVICE else Place.DEVICE)
