"""Where this rank stands among stages and data ranks, under the names of DeepSpeed's grid (and Megatron's mpu)."""

from __future__ import annotations

from typing import Any

from sheer.comm import Mesh
from sheer.pipeline.topology import PipeDataParallelTopology, ProcessTopology


class PipelineParallelGrid:
    """Of an engine: `engine.grid`. There is no tensor parallelism, so every model-parallel size is 1."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.global_rank = mesh.world.rank
        self.world_size = mesh.world.size
        self.stage_id = mesh.stage
        self.data_parallel_id = mesh.data.rank
        self.pipe_parallel_size = mesh.stages
        self.data_parallel_size = mesh.data.size
        self.model_parallel_size = self.slice_parallel_size = 1
        self.is_first_stage = mesh.stage == 0
        self.is_last_stage = mesh.stage == mesh.stages - 1

    def topology(self) -> ProcessTopology:
        """The grid of all ranks."""
        return PipeDataParallelTopology(self.pipe_parallel_size, self.data_parallel_size)

    def stage_to_global(self, stage_id: int, **coordinates: int) -> int:
        """The rank on another stage that has this one's data rank (or `data=`)."""
        return self.topology().get_rank(**{"pipe": stage_id, "data": self.data_parallel_id, **coordinates})

    def get_global_rank(self) -> int:
        """This process's rank of all."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """This process's stage."""
        return self.stage_id

    get_pipe_parallel_rank = get_stage_id

    def get_data_parallel_id(self) -> int:
        """This process's rank among those of its stage."""
        return self.data_parallel_id

    get_data_parallel_rank = get_data_parallel_id

    def get_pipe_parallel_world_size(self) -> int:
        """Number of stages."""
        return self.pipe_parallel_size

    def get_data_parallel_world_size(self) -> int:
        """Ranks of each stage."""
        return self.data_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """The process group of the ranks with this data rank; None where there is one stage."""
        return self._mesh.pipe.group

    def get_data_parallel_group(self) -> Any:
        """The process group of this stage's ranks; None where there is one."""
        return self._mesh.data.group

    def get_model_parallel_rank(self) -> int:
        """0: there is no tensor parallelism."""
        return 0

    get_slice_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self) -> int:
        """1: there is no tensor parallelism."""
        return 1

    get_slice_parallel_world_size = get_model_parallel_world_size

    def get_model_parallel_group(self) -> None:
        """None: a rank alone."""

    get_slice_parallel_group = get_model_parallel_group
