"""The bucket runtime: parameters in flat buffers, gradients reduced and parameters gathered while the model runs.

For users: `Init`, `materialize`, `GatheredParameters`, `register_external_parameter`.
"""

from sheer.zero.access import GatheredParameters, register_external_parameter, unregister_external_parameter
from sheer.zero.autograd import inside_backward
from sheer.zero.building import Init, building_here
from sheer.zero.flat import FlatBucket, Source, assemble
from sheer.zero.gathering import Pass, Phase
from sheer.zero.marks import built_place_of
from sheer.zero.materialize import materialize
from sheer.zero.runtime import Wiring, ZeroRuntime, placed_of, runtime_of
from sheer.zero.saving import runs_twice
from sheer.zero.units import NO_UNITS, ROOT, Units, find_units, large_layers

__all__ = [
    "NO_UNITS",
    "ROOT",
    "FlatBucket",
    "GatheredParameters",
    "Init",
    "Pass",
    "Phase",
    "Source",
    "Units",
    "Wiring",
    "ZeroRuntime",
    "assemble",
    "building_here",
    "built_place_of",
    "find_units",
    "inside_backward",
    "large_layers",
    "materialize",
    "placed_of",
    "register_external_parameter",
    "runs_twice",
    "runtime_of",
    "unregister_external_parameter",
]
