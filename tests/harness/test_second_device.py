from __future__ import annotations

import pytest
import torch

from tests.harness.second_device import DEVICE, MixedDevices, second_device


def test_only_copies_cross() -> None:
    with second_device():
        there, here = torch.zeros(4, device=DEVICE), torch.zeros(4)
        here.copy_(there.to(torch.bfloat16))
        assert here.to(DEVICE).device == DEVICE
        assert there.data_ptr() != here.data_ptr()
        assert there.is_set_to(there.view(4))
        for mix in (lambda: here.add_(there), lambda: there + here, lambda: torch.where(there > 0, here, here)):
            with pytest.raises(MixedDevices):
                mix()
