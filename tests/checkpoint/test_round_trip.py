from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sheer.checkpoint import Axis, Key, Shard, load, load_full, open_checkpoint, read_rng, read_state, save
from sheer.checkpoint.shard import DTYPES
from tests.checkpoint.ranks import Solo, cut, on_ranks, same, whole

NAMES = [
    "w",
    "a.b.c",
    "a/b",
    "..",
    "../../etc/passwd",
    "with space",
    "ünï.çødé.層",
    "x" * 3000,
    "",
    "index.json",
    "__metadata__",
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, but for bool, of which torch knows two patterns only."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def save_alone(root: Path, shards: list[Shard], tag: str = "t", **facts: object) -> Path:
    return save(root, tag, shards=shards, facts=facts, state={}, rng={}, axis=Solo())


@st.composite
def tensors(draw: st.DrawFn) -> dict[Key, torch.Tensor]:
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    kinds = st.sampled_from(["param", "buffer", "optim.exp_avg", "optim.step"])
    keys = draw(st.lists(st.builds(Key, kinds, st.sampled_from(NAMES)), unique=True, max_size=5))
    dtypes = st.sampled_from(list(DTYPES.values()))
    return {key: random_tensor(draw(shapes), draw(dtypes), seed) for seed, key in enumerate(keys)}


@st.composite
def tilings(draw: st.DrawFn, given_tensors: dict[Key, torch.Tensor]) -> list[list[Shard]]:
    """The tensors in random pieces, each held by a random rank of 1 to 4."""
    world = draw(st.integers(1, 4))
    ranks: list[list[Shard]] = [[] for _ in range(world)]
    for key, value in given_tensors.items():
        for shard in cut(*key, value, cuts=draw(st.lists(st.integers(1, 700), max_size=4))):
            ranks[draw(st.integers(0, world - 1))].append(shard)
    return ranks


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tiling_loads_as_any_other_exactly(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    values = data.draw(tensors())
    saved, wanted = data.draw(tilings(values)), data.draw(tilings(values))
    root = tmp_path_factory.mktemp("ckpt")
    on_ranks(
        len(saved),
        lambda axis: save(root, "t", shards=saved[axis.rank], facts={}, state={"n": 1}, rng={}, axis=axis),
    )
    blank = [[Shard(s.kind, s.name, s.shape, s.start, torch.zeros_like(s.data)) for s in shards] for shards in wanted]
    index = open_checkpoint(root)
    reports = on_ranks(len(wanted), lambda axis: load(index, wanted=blank[axis.rank], axis=axis))
    for got, expected in zip(itertools.chain(*blank), itertools.chain(*wanted), strict=True):
        assert same(got.data, expected.data), got.key
    assert {report.loaded for report in reports} == {tuple(sorted(values))}
    for key, value in values.items():
        assert same(load_full(root, kinds=(key.kind,))[key.name], value)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_keeps_its_bits_beyond_the_inline_size(tmp_path: Path, dtype: torch.dtype) -> None:
    value = random_tensor((13, 77), dtype, 3)
    save_alone(tmp_path, [*cut("param", "w", value, cuts=[100, 101, 500])])
    assert same(load_full(tmp_path)["w"], value)


def test_pieces_larger_than_chunks_and_blocks(tmp_path: Path) -> None:
    value = torch.arange(5_000_003, dtype=torch.float32)  # 20 MB: several chunks, a last block that is not full
    shards = cut("param", "w", value, cuts=[1, 4_000_001])
    on_ranks(2, lambda axis: save(tmp_path, "t", shards=shards[axis.rank :: 2], facts={}, state={}, rng={}, axis=axis))
    assert same(load_full(tmp_path)["w"], value)
    pieces = [
        Shard("param", "w", (5_000_003,), at, torch.zeros(n)) for at, n in [(0, 5), (262_143, 2), (3_999_990, 9_999)]
    ]
    report = load(open_checkpoint(tmp_path), wanted=pieces, axis=Solo())
    for piece in pieces:
        assert same(piece.data, value[piece.start : piece.stop])
    assert report.nbytes < 8 * 2**20, "only the blocks that hold wanted elements are fetched"


def test_other_dtypes_convert(tmp_path: Path) -> None:
    value = torch.randn(3_000_000)
    save_alone(tmp_path, [whole("param", "w", value), whole("optim.step", "w", torch.tensor(7))])
    narrow, step = torch.zeros(3_000_000, dtype=torch.bfloat16), torch.zeros(1)
    load(
        open_checkpoint(tmp_path),
        wanted=[whole("param", "w", narrow), Shard("optim.step", "w", (), 0, step)],
        axis=Solo(),
    )
    assert same(narrow, value.bfloat16())
    assert step.item() == 7.0


def test_state_and_rng_come_back_equal(tmp_path: Path) -> None:
    state = {
        "betas": (0.9, 0.999),
        "milestones": {30: 1, 80: 2},
        "best": float("inf"),
        "": None,
        "nested": [{"$tuple": [1]}, {"$items": []}, ((), {}), True, -(2**70), 0.1, "\ud800", "層"],
    }

    def body(axis: Axis) -> None:
        rng = {"cpu": torch.tensor([axis.rank, 5], dtype=torch.uint8)} if axis.rank != 2 else {}
        save(tmp_path, "t", shards=[], facts={"groups": [(1, 2)]}, state=state, rng=rng, axis=axis)

    on_ranks(3, body)
    index = open_checkpoint(tmp_path)
    assert read_state(index) == state
    assert index.facts == {"groups": [(1, 2)]}
    assert [read_rng(index, rank) for rank in (2, 3)] == [None, None]
    states = read_rng(index, 1)
    assert states is not None
    assert states.keys() == {"cpu"}
    assert states["cpu"].tolist() == [1, 5]


def test_thousands_of_scalars_take_no_tensor_file(tmp_path: Path) -> None:
    steps = {f"layers.{i}.w": torch.tensor(float(i)) for i in range(3000)}
    path = save_alone(tmp_path, [whole("optim.step", name, step) for name, step in steps.items()])
    assert sorted(p.name for p in path.iterdir()) == ["index.json", "rng.safetensors", "state.json"]
    assert load_full(tmp_path, kinds=["optim.step"]) == steps


def test_any_safetensors_reader_reads_the_tensor_files(tmp_path: Path) -> None:
    values = {
        "half": torch.randn(100).half(),
        "double": torch.randn(50).double(),
        "odd": torch.arange(99).to(torch.uint8),
    }
    path = save_alone(tmp_path, [whole("param", name, value) for name, value in values.items()])
    with safetensors.safe_open(path / "rank00000.safetensors", "pt") as file:
        for name, value in values.items():
            assert same(file.get_tensor(f"param:{name}[0:{value.numel()}]"), value)


def test_each_byte_is_stored_once_whatever_the_world(tmp_path: Path) -> None:
    value = torch.randn(1_000_000)
    shards = cut("param", "w", value, cuts=[250_000, 500_000, 750_000])
    on_ranks(4, lambda axis: save(tmp_path, "t", shards=[shards[axis.rank]], facts={}, state={}, rng={}, axis=axis))
    size = sum(file.stat().st_size for file in (tmp_path / "t").iterdir())
    assert value.nbytes < size < value.nbytes + 4000


def test_a_leaf_that_requires_grad_loads_in_place(tmp_path: Path) -> None:
    model = torch.nn.Linear(20, 30)
    save_alone(tmp_path, [whole("param", name, p) for name, p in model.named_parameters()])
    other = torch.nn.Linear(20, 30)
    wanted = [Shard("param", n, tuple(p.shape), 0, p.view(-1)) for n, p in other.named_parameters()]
    load(open_checkpoint(tmp_path), wanted=wanted, axis=Solo())
    assert same(other.weight, model.weight)
    assert other.weight.requires_grad


def test_nothing_depends_on_the_default_device(tmp_path: Path) -> None:
    value = torch.randn(100)
    with torch.device("meta"):
        save_alone(tmp_path, [whole("param", "w", value)])
        assert same(load_full(tmp_path)["w"], value)
