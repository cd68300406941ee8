"""Process-wide state that a test may change: noted before, put back after."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch

SEED = 0


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a test between two equal worlds: environment, directory, signals, torch's settings; and from fixed seeds."""
    environ, folder = dict(os.environ), os.getcwd()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    _seed()
    try:
        with _torch_settings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        for number, handler in handlers.items():
            # None: installed by C code (faulthandler, for one), which Python can neither name nor restore.
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        _forget_compiled_code()
        collect_garbage()


def _seed() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


class TorchSetting(NamedTuple):
    """A global of torch, as it is read and written."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


TORCH_SETTINGS = (
    TorchSetting(torch.get_default_dtype, torch.set_default_dtype),
    TorchSetting(torch.get_default_device, lambda _: torch.set_default_device(None)),  # any device installs a mode
    TorchSetting(torch.get_num_threads, torch.set_num_threads),
    TorchSetting(torch.is_grad_enabled, torch.set_grad_enabled),
    TorchSetting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    TorchSetting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    TorchSetting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)


@contextmanager
def _torch_settings() -> Iterator[None]:
    before = [setting.read() for setting in TORCH_SETTINGS]
    try:
        yield
    finally:
        for setting, value in zip(TORCH_SETTINGS, before, strict=True):
            # Only where it differs: some setters import half of the compiler.
            if setting.read() != value:
                setting.write(value)


def _forget_compiled_code() -> None:
    """Each test starts with no compiled code, so that no recompile limit is reached by the tests before it."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def collect_garbage() -> None:
    """Free the cycles that a test left. What is still there then is not looked at again after the next test."""
    gc.collect()
    gc.freeze()
