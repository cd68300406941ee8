"""Pipeline parallelism: a model cut into stages, what they send each other, and running one stage's actions.

`specs` are layers not built yet, `layers` a list of them as a source of units; `cut` is a plain model as one, recorded
by `tracing` as a `program` that `slicing` takes apart. `split` and `partition` deal units out to stages, `module` is
what the user holds and the engine trains, `entry` how data comes in, `recompute` its activation checkpointing.

`runner` interprets one stage's actions; `mail` holds it to the messages of its schedule, `messages` puts them on links,
`structure` says what may travel; `backward` splits a backward in halves.
"""

from sheer.pipeline.entry import Batch
from sheer.pipeline.grid import PipelineParallelGrid
from sheer.pipeline.mail import routes
from sheer.pipeline.module import PipelineModule
from sheer.pipeline.runner import Outcome, Runner
from sheer.pipeline.specs import LayerSpec, TiedLayerSpec
from sheer.pipeline.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = [
    "Batch",
    "LayerSpec",
    "Outcome",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "Runner",
    "TiedLayerSpec",
    "routes",
]
