"""The bucket runtime: parameters as views of flat buffers, gradients reduced while backward runs."""

from sheer.zero.flat import LOW_PRECISION, FlatBucket
from sheer.zero.runtime import Wiring, ZeroRuntime, runtime_of

__all__ = ["LOW_PRECISION", "FlatBucket", "Wiring", "ZeroRuntime", "runtime_of"]
