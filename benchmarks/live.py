"""Bytes that are really there: live tensors by walking them, and the allocator's peak during a step."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


class Live(NamedTuple):
    """Bytes of all storages that some tensor in this process sees."""

    held: int
    """By tensors."""
    idle: int
    """Blocks kept for reuse: seen as plain bytes (uint8) only. The models here have no uint8 tensors of their own."""


def live() -> Live:
    """Walk every tensor that Python reaches, and its gradient; storages count once."""
    gc.collect()
    sizes: dict[int, int] = {}
    typed: set[int] = set()
    for tensor in _tensors():
        storage = tensor.untyped_storage()
        address = storage._cdata  # a placeholder of stage 3 refuses its pointer
        sizes[address] = storage.nbytes()
        if tensor.dtype is not torch.uint8:
            typed.add(address)
    held = sum(size for address, size in sizes.items() if address in typed)
    return Live(held, sum(sizes.values()) - held)


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):
            continue
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            if tensor is not None:
                tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own part
                if tensor.layout is torch.strided and tensor.device.type != "meta":
                    yield tensor


def peak_above_rest(step: Callable[[], object]) -> int:
    """How far the allocator's total rises during `step` above where it began, in bytes; as torch's profiler is told of
    every allocation."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    total = peak = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return peak
