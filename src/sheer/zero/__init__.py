"""The bucket runtime: parameters in flat buffers, gradients reduced and parameters gathered while the model runs.

For users: `GatheredParameters`.
"""

from sheer.zero.access import GatheredParameters, register_external_parameter, unregister_external_parameter
from sheer.zero.autograd import inside_backward
from sheer.zero.flat import FlatBucket, Source, assemble
from sheer.zero.gathering import Pass, Phase
from sheer.zero.runtime import Wiring, ZeroRuntime, placed_of, runtime_of
from sheer.zero.saving import runs_twice
from sheer.zero.units import NO_UNITS, ROOT, Units, find_units

__all__ = [
    "NO_UNITS",
    "ROOT",
    "FlatBucket",
    "GatheredParameters",
    "Pass",
    "Phase",
    "Source",
    "Units",
    "Wiring",
    "ZeroRuntime",
    "assemble",
    "find_units",
    "inside_backward",
    "placed_of",
    "register_external_parameter",
    "runs_twice",
    "runtime_of",
    "unregister_external_parameter",
]
