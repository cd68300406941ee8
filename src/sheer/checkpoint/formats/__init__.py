"""Other projects' files, one file per format. Each writes `Weights`, and knows nothing of the other formats.

A format's `write(weights, target, ...)` makes `target`, which must not exist: aside first, flushed, and renamed.
"""

from sheer.checkpoint.formats.weights import Weights

__all__ = ["Weights"]
