"""Which stage this process is, and which units each virtual stage gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

from sheer import comm
from sheer.errors import UsageError
from sheer.pipeline import partition
from sheer.pipeline.topology import PipeDataParallelTopology, ProcessTopology
from sheer.pipeline.units import Held, Source


class Grid(NamedTuple):
    """The stages, and where this process stands among them."""

    topology: ProcessTopology
    stage: int
    chunks: int
    placement: tuple[int, ...]
    alone: bool
    """Whether the stage was said, so that no other rank need be there."""

    @property
    def stages(self) -> int:
        """How many there are."""
        return self.topology.get_dim("pipe")


def find_grid(
    num_stages: int | None,
    *,
    topology: ProcessTopology | None,
    stage: int | None,
    chunks: int,
    placement: str | Sequence[int],
) -> Grid:
    """The grid that the arguments of a PipelineModule ask for, on the ranks there are.

    Without `stage` this process's stage follows from its rank: from the process group, else from the launcher's
    environment.
    """
    alone = stage is not None
    world = comm.world_size()
    stages = _stages(num_stages, topology)
    if chunks < 1:
        raise UsageError(f"chunks is {chunks}; it is the number of virtual stages per stage, at least 1")
    if stage is not None:
        if not 0 <= stage < stages:
            raise UsageError(f"stage is {stage}; with num_stages={stages} it is one of 0 .. {stages - 1}")
        grid = topology or PipeDataParallelTopology(num_pp=stages, num_dp=1)
    else:
        grid = topology or _over(world, stages)
        if grid.world_size() != world:
            raise UsageError(f"the topology {grid} is for {grid.world_size()} ranks, but there are {world}")
        stage = grid.get_coord(comm.rank()).pipe
    return Grid(grid, stage, chunks, partition.place(placement, stages=stages, chunks=chunks), alone)


def _stages(num_stages: int | None, topology: ProcessTopology | None) -> int:
    given = None if topology is None else topology.get_dim("pipe")
    if given == 0:
        raise UsageError(f"the topology {topology} has no axis 'pipe'; use PipeDataParallelTopology(num_pp, num_dp)")
    if num_stages is None and given is None:
        raise UsageError("say into how many stages the model is cut: num_stages=..., or a topology; 1 cuts nothing")
    if num_stages is not None and given is not None and num_stages != given:
        raise UsageError(
            f"num_stages is {num_stages}, but the topology {topology} has {given} stages; give one of them"
        )
    stages = num_stages if num_stages is not None else given
    assert stages is not None
    if stages < 1:
        raise UsageError(f"num_stages is {stages}; it must be at least 1")
    return stages


def _over(world: int, stages: int) -> ProcessTopology:
    if world % stages:
        fitting = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise UsageError(
            f"num_stages={stages} does not divide the {world} rank(s) there are. Start a multiple of {stages} ranks"
            f" (torchrun --nproc-per-node {stages}), or use as many stages as divide {world}: {fitting}. To build one"
            " stage without a launcher, say stage=..."
        )
    return PipeDataParallelTopology(num_pp=stages, num_dp=world // stages)


def choose_parts(
    source: Source, grid: Grid, *, method: str, boundaries: Sequence[int] | None, sample: Any
) -> tuple[range, ...]:
    """The units of each virtual stage. Collective on the world where they are to be measured, else pure."""
    count, parts = len(source.kinds), len(grid.placement)
    partition.check_method(method)
    if boundaries is not None:
        cuts = partition.check_boundaries(boundaries, layers=count, parts=parts)
    else:
        cuts = partition.balanced(_weights(source, method, sample, alone=grid.alone), parts)
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def _weights(source: Source, method: str, sample: Any, *, alone: bool) -> Sequence[float]:
    name, _, pattern = method.partition(":")
    match name.lower():
        case "uniform":
            return [1] * len(source.kinds)
        case "parameters":
            return source.numels()
        case "type":
            return partition.type_weights(source.kinds, pattern)
    if sample is None:
        raise UsageError(
            "partition_method 'time' measures each layer: give sample_input, what the first layer takes for one"
            " micro-batch; or balance 'parameters'"
        )
    return _measured(source, sample, alone=alone)


def _measured(source: Source, sample: Any, *, alone: bool) -> Sequence[float]:
    """The seconds that rank 0 measures, on every rank."""
    if alone or comm.world_size() == 1:
        return source.seconds(sample)
    if not comm.is_initialized():
        raise UsageError(
            "partition_method 'time' is decided on rank 0 and sent to the others: call"
            " torch.distributed.init_process_group before the PipelineModule is built"
        )
    axis = comm.data_axis()

    def measure() -> Sequence[float]:
        return source.seconds(sample) if axis.rank == 0 else ()

    found = axis.together(measure, doing="measuring the layers of a PipelineModule")
    return cast(Sequence[float], axis.broadcast_object(found))


def stages_of(held: Sequence[Held], parts: Sequence[range], placement: Sequence[int]) -> tuple[int, ...]:
    """The stages that hold one of these places, each once, in order of units."""
    order = [stage for one in held for part, stage in zip(parts, placement, strict=True) if one.unit in part]
    return tuple(dict.fromkeys(order))


def canonical_names(ties: Mapping[str, Sequence[Held]], mine: set[int]) -> dict[str, str]:
    """From the names that tied parameters have in these units to their names in the whole model, where they differ."""
    return {
        held.name: canonical
        for canonical, places in ties.items()
        for held in places
        if held.unit in mine and held.name != canonical
    }
