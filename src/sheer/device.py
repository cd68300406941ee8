"""The one file that knows device names. Everything else takes a `torch.device` and asks here."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

# Which process-group backend speaks for which device type; anything else falls back to gloo.
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "hpu": "hccl"}

_ALIGNMENT = 256
"""Bytes; accelerators' allocators give no less, the CPU's gives 64."""


def pick(local_rank: int) -> torch.device:
    """The device this process trains on: its accelerator by local rank where there is one, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, local_rank % torch.accelerator.device_count())


def activate(device: torch.device) -> None:
    """Make `device` the current one, where that means something."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def backend(device: torch.device) -> str:
    """The process-group backend for `device`."""
    return _BACKENDS.get(device.type, "gloo")


def local_rank(*, rank: int) -> int:
    """This process's index on its machine, as the launcher gave it; where it gave none, `rank`, its index of all."""
    return int(os.environ.get("LOCAL_RANK", rank))


def aligned_zeros(numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat buffer that starts at a multiple of 256 bytes, so that aligned places in it are aligned memory."""
    buffer = torch.zeros(numel, dtype=dtype, device=device)
    if buffer.data_ptr() % _ALIGNMENT == 0:
        return buffer
    roomy = torch.zeros(numel + _ALIGNMENT // dtype.itemsize, dtype=dtype, device=device)
    shift = -roomy.data_ptr() % _ALIGNMENT // dtype.itemsize
    return roomy[shift : shift + numel]


def pinned_zeros(numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat buffer in page-locked memory of the host (`device`)."""
    return torch.zeros(numel, dtype=dtype, device=device, pin_memory=True)


def host() -> torch.device:
    """The machine's own memory."""
    return torch.device("cpu")


def to_host(tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
    """`tensor` in the host's memory; itself if it is there."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)


def is_host(device: torch.device) -> bool:
    """Whether `device` works in the machine's own memory."""
    return device.type == "cpu"


def rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Generator states of this process: always the CPU's, and the accelerator's where there is one."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_rng_states(device: torch.device, states: dict[str, torch.Tensor]) -> None:
    """Restore what `rng_states` gave; states of other device types are left alone."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def host_memory(nbytes: int, *, near: Iterable[torch.device]) -> torch.Tensor:
    """Bytes on the host that tensors of the devices `near` are copied to; pinned where one is an accelerator's."""
    pinned = any(device.type != "cpu" for device in near)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def synchronize(used: Iterable[torch.device]) -> None:
    """Wait until everything submitted to the devices `used` is done; nothing is ever due on the host."""
    for device in used:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
