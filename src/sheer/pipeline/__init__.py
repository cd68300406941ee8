"""Pipeline parallelism: a model cut into stages, what they send each other, and running one stage's actions.

`specs` are layers not built yet, `layers` a list of them as a source of units, `split` and `partition` deal units out
to stages, `module` is what the user holds and the engine trains, `recompute` its activation checkpointing.
"""

from sheer.pipeline.module import Batch, PipelineModule
from sheer.pipeline.specs import LayerSpec, TiedLayerSpec
from sheer.pipeline.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = [
    "Batch",
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
]
