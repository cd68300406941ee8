from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """No test sees what torch has learnt of the blocks' code in another: which sizes vary, for one."""
    torch._dynamo.pgo.reset_code_state()
