"""Process-wide state that a test may change: noted before, put back after."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
        gc.collect()


def _seed() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


@contextmanager
def _torch_settings() -> Iterator[None]:
    dtype, device, threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    grad, anomaly = torch.is_grad_enabled(), torch.is_anomaly_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:  # setting it, even to what it was, installs a function mode
            torch.set_default_device(None)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.autograd.set_detect_anomaly(anomaly)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_float32_matmul_precision(precision)


def _forget_compiled_code() -> None:
    """Each test starts with no compiled code, so that no recompile limit is reached by the tests before it."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
