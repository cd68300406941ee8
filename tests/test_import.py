"""`import sheer` costs next to nothing and changes nothing that others can see."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import sheer

# Prints, as JSON, every piece of process-wide state, before and after the import.
STATE = """
import atexit, decimal, faulthandler, gc, json, locale, logging, multiprocessing, os, random, signal, sys, tempfile
import threading, warnings
import numpy, torch, torch._dynamo, torch._inductor.config, torch.distributed

def state():
    loggers = {n: l for n, l in logging.Logger.manager.loggerDict.items() if isinstance(l, logging.Logger)}
    return {
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "sys.path": sys.path,
        "import hooks": [repr(f) for f in (*sys.meta_path, *sys.path_hooks)],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval()],
        "root logger": [logging.root.level, repr(logging.root.handlers), logging.root.manager.disable],
        "loggers": {n: [l.level, l.propagate, repr(l.handlers)] for n, l in loggers.items() if n != "sheer"},
        "our logger": [logging.getLogger("sheer").level, repr(logging.getLogger("sheer").handlers)],
        "warning filters": repr(warnings.filters),
        "warning printer": repr(warnings.showwarning),
        "hooks": repr([sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook]),
        "streams": repr([sys.stdin, sys.stdout, sys.stderr]),
        "signals": {str(n): repr(signal.getsignal(n)) for n in signal.valid_signals()},
        "at exit": atexit._ncallbacks(),
        "threads": [t.name for t in threading.enumerate()],
        "garbage collector": [gc.isenabled(), gc.get_threshold(), repr(gc.callbacks)],
        "faulthandler": faulthandler.is_enabled(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "temporary directory": tempfile.tempdir,
        "locale": locale.setlocale(locale.LC_ALL),
        "random": [str(random.getstate()), repr(numpy.random.get_state()), torch.get_rng_state().tolist()],
        "torch": [
            str(torch.get_default_dtype()),
            str(torch.get_default_device()),
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            torch.is_grad_enabled(),
            torch.is_anomaly_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.is_autocast_enabled("cpu"),
            torch.multiprocessing.get_sharing_strategy(),
            torch.distributed.is_initialized(),
        ],
        "dynamo": repr(torch._dynamo.config.save_config_portable()),
        "inductor": repr(torch._inductor.config.save_config_portable()),
    }

logging.getLogger("sheer")
before = state()
import sheer
print(json.dumps([before, state()]))
"""

# Prints the names of the modules that the import adds to those of torch.
MODULES = """
import json, sys
import torch
before = set(sys.modules)
import sheer
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def answer_of(script: str, *options: str) -> list:
    command = [sys.executable, *options, "-c", script]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=110).stdout)


def test_nothing_global_changes():
    before, after = answer_of(STATE)
    for what, value in before.items():
        assert after[what] == value, what


def test_it_loads_little_beyond_torch():
    added = answer_of(MODULES, "-W", "error")
    assert "sheer" in added
    assert {name.partition(".")[0] for name in added} <= {"sheer", *sys.stdlib_module_names}
    assert len(added) <= 20, added


@pytest.mark.parametrize("name", sheer.__all__)
def test_every_public_name_is_there(name):
    assert getattr(sheer, name) is not None
    assert name in dir(sheer)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'sheer' has no attribute 'initialise'"):
        _ = sheer.initialise
