"""Which layers go where: against trying all splits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheer.errors import UsageError
from sheer.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from sheer.pipeline import partition


def heaviest(weights, cuts):
    return max(sum(weights[a:b]) for a, b in itertools.pairwise(cuts))


@given(weights=st.lists(st.integers(0, 9), max_size=8), parts=st.integers(1, 5))
def test_the_heaviest_part_is_as_light_as_can_be(weights, parts):
    cuts = partition.balanced(weights, parts)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(weights), parts + 1)
    assert cuts == sorted(cuts)
    if len(weights) >= parts:
        assert all(a < b for a, b in itertools.pairwise(cuts))
    every = itertools.combinations_with_replacement(range(len(weights) + 1), parts - 1)
    assert heaviest(weights, cuts) == min(heaviest(weights, [0, *inner, len(weights)]) for inner in every)


@pytest.mark.parametrize(
    ("weights", "parts", "cuts"),
    [
        ([1] * 8, 4, [0, 2, 4, 6, 8]),
        ([1] * 5, 2, [0, 3, 5]),
        ([5, 1, 1, 1, 1, 1], 2, [0, 1, 6]),
        ([0, 0, 4, 0, 0, 4], 2, [0, 3, 6]),
        ([1, 1], 3, [0, 1, 2, 2]),
        ([], 2, [0, 0, 0]),
        ([0.1, 0.2, 0.3], 1, [0, 3]),
    ],
)
def test_where_the_cuts_are(weights, parts, cuts):
    assert partition.balanced(weights, parts) == cuts


def test_types_match_in_any_case_and_anywhere_in_the_name():
    assert partition.type_weights(["Embedding", "GPTBlock", "double"], "block|DOUBLE") == [0, 1, 1]
    with pytest.raises(
        UsageError, match=r"matches no layer; their classes are Embedding, Block\. Did you mean 'Block'"
    ):
        partition.type_weights(["Embedding", "Block", "Block"], "Blok")
    with pytest.raises(UsageError, match="no regular expression"):
        partition.type_weights(["a"], "(")


def test_placements():
    assert partition.place("loop", stages=3, chunks=2) == (0, 1, 2, 0, 1, 2)
    assert partition.place("v", stages=3, chunks=2) == (0, 1, 2, 2, 1, 0)
    assert partition.place([1, 0, 0, 1], stages=2, chunks=2) == (1, 0, 0, 1)
    with pytest.raises(UsageError, match="exactly 2 times"):
        partition.place([0, 0, 0, 1], stages=2, chunks=2)
    with pytest.raises(UsageError, match="'loop', 'v'"):
        partition.place("w", stages=2, chunks=2)


def test_topology_counts_the_last_axis_fastest():
    grid = PipeDataParallelTopology(num_pp=2, num_dp=3)
    assert [grid.get_rank(pipe=p, data=d) for p in range(2) for d in range(3)] == list(range(6))
    assert grid.get_coord(4) == (1, 1)
    assert grid.get_coord(4).pipe == 1
    assert grid.get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]
    assert grid.get_axis_comm_lists("pipe") == [[0, 3], [1, 4], [2, 5]]
    assert grid.get_axis_comm_lists("model") == []
    assert grid.get_axis_list("data", 2) == [2, 5]
    assert (grid.world_size(), grid.get_dim("data"), grid.get_dim("model")) == (6, 3, 0)
    three = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert three.get_rank(pipe=1, data=0, model=1) == 5
    assert three.get_rank_repr(5) == "model_01"
    assert three.filter_match(pipe=0, model=1) == [1, 3]
    with pytest.raises(UsageError, match=r"no axis 'pip' in .*Did you mean 'pipe'"):
        grid.filter_match(pip=0)
    with pytest.raises(UsageError, match=r"outside 0 \.\. 5"):
        grid.get_coord(6)
    with pytest.raises(UsageError, match="distinct axes"):
        ProcessTopology(axes=["a", "a"], dims=[1, 1])
