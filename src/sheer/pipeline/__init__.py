"""Pipeline parallelism: a model cut into stages, what they send each other, and running one stage's actions.

`specs` are layers not built yet, `layers` a list of them as a source of units; `cut` is a plain model as one, recorded
by `tracing` as a `program` that `slicing` takes apart. `split` and `partition` deal units out to stages, `module` is
what the user holds and the engine trains, `entry` how data comes in, `recompute` its activation checkpointing.
"""

from sheer.pipeline.entry import Batch
from sheer.pipeline.module import PipelineModule
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
