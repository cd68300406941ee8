"""Grids of ranks under DeepSpeed's names."""

from sheer.pipeline import PipelineParallelGrid
from sheer.pipeline.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]
