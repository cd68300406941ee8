"""Where a rank stands in a grid of named axes: pure arithmetic, under DeepSpeed's names."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from sheer.errors import UsageError, did_you_mean


class ProcessTopology:
    """Ranks counted row-major over named axes: the last axis changes fastest.

    ProcessTopology(axes=["pipe", "data"], dims=[2, 4]).get_rank(pipe=1, data=0) == 4
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise UsageError(f"a topology needs distinct axes with one positive size each, got {axes} and {dims}")
        self.axes = list(axes)
        self.dims = list(dims)

    def world_size(self) -> int:
        """How many ranks there are."""
        return prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """The axes, slowest first."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """The size of `axis`; 0 where there is none of that name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coordinates: int) -> int:
        """The rank at these coordinates, all of which must be given."""
        if set(coordinates) != set(self.axes):
            raise UsageError(f"get_rank takes {', '.join(self.axes)}; got {', '.join(coordinates) or 'nothing'}")
        rank = 0
        for axis, dim in zip(self.axes, self.dims, strict=True):
            if not 0 <= coordinates[axis] < dim:
                raise UsageError(f"{axis} = {coordinates[axis]} is outside 0 .. {dim - 1}")
            rank = rank * dim + coordinates[axis]
        return rank

    def get_coord(self, rank: int) -> Any:
        """The coordinates of `rank`, as a named tuple."""
        if not 0 <= rank < self.world_size():
            raise UsageError(f"rank {rank} is outside 0 .. {self.world_size() - 1}")
        places = []
        for dim in reversed(self.dims):
            rank, place = divmod(rank, dim)
            places.append(place)
        coordinate: Any = namedtuple("Coordinate", self.axes)  # type: ignore[misc]
        return coordinate(*reversed(places))

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """The coordinates as text, such as `model_00`, without `omit_axes`."""
        coordinate = self.get_coord(rank)
        kept = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coordinate, axis):02d}" for axis in kept)

    def filter_match(self, **coordinates: int) -> list[int]:
        """The ranks that have all of these coordinates, in order."""
        for axis in coordinates:
            self._check(axis)
        found = range(self.world_size())
        return [r for r in found if all(getattr(self.get_coord(r), a) == v for a, v in coordinates.items())]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks whose coordinate on `axis` is `idx`."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups that talk along `axis`: ranks that differ only there. Empty where there is no such axis."""
        if axis not in self.axes:
            return []
        others = [a for a in self.axes if a != axis]
        places = product(*(range(self.get_dim(a)) for a in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]

    def _check(self, axis: str) -> None:
        if axis not in self.axes:
            raise UsageError(f"no axis {axis!r} in {self.axes}.{did_you_mean(axis, self.axes)}")

    def __str__(self) -> str:
        return " x ".join(f"{axis} {dim}" for axis, dim in zip(self.axes, self.dims, strict=True))


class PipeDataParallelTopology(ProcessTopology):
    """Stages times data-parallel ranks: rank = stage * num_dp + data rank."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, data-parallel and model-parallel ranks; the model axis changes fastest."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])
