"""Other projects' files, one file per format. Each writes `Weights` and reads `Foreign`, and knows none of the others
(a Hugging Face folder is made of safetensors).

A format's `write(weights, target, ...)` makes `target`, which must not exist: aside first, flushed, and renamed.
"""

from sheer.checkpoint.formats.weights import Foreign, Weights

__all__ = ["Foreign", "Weights"]
