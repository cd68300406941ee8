"""Sheer: a training engine for PyTorch that shards, compiles and checkpoints your module itself, never a wrapper of it."""

__version__ = "0.1.0"
