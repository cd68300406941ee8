from __future__ import annotations

import os

import hypothesis
import torch

pytest_plugins = ["pytester"]

# Properties draw the same examples in every run, on every rank and machine; none fails for being slow.
hypothesis.settings.register_profile("sheer", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("sheer")

# One thread for each process, those that tests start included: there are more processes than cores here, and threads
# that wait for each other on too few of them take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


def pytest_ignore_collect(collection_path):
    """The cases of the plugin's tests are run by those tests, in a pytest of their own."""
    return True if collection_path.parts[-3:] == ("tests", "testing", "cases") else None
