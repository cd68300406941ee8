"""The pipeline's names where DeepSpeed has them: `from sheer.pipe import PipelineModule, LayerSpec, TiedLayerSpec`."""

from sheer.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from sheer.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
]
