from __future__ import annotations

import pytest
import torch

from tests.harness.host_sync import HostSync, no_host_sync

BUGS = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t.isfinite().all()),
    "branch": lambda t: 1 if t.sum() > 0 else 0,
    "float": lambda t: float(t[0]),
    "int": lambda t: int(t[0]),
    "cpu": lambda t: t.cpu(),
    "numpy": lambda t: t.numpy(),
    "tolist": lambda t: t.tolist(),
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "nonzero": lambda t: t.nonzero(),
    "boolean index": lambda t: t[t > 0],
    "where": lambda t: torch.where(t > 0),
    "unique": lambda t: t.unique(),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_sync_is_caught(bug):
    t = torch.arange(4.0)
    BUGS[bug](t)
    with pytest.raises(HostSync), no_host_sync():
        BUGS[bug](t)


def test_a_sync_in_a_gradient_hook_is_caught():
    t = torch.ones(3, requires_grad=True)
    t.register_hook(lambda grad: print(grad.sum().item()))
    with pytest.raises(HostSync), no_host_sync():
        (t * t).sum().backward()


def test_a_step_without_sync_is_clean():
    """Fused AdamW, clipping and a skip through `found_inf` stay on the device."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.found_inf = torch.zeros(())
    optimizer.grad_scale = torch.ones(())
    with no_host_sync():
        model(torch.ones(2, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_it_ends_with_the_block():
    with no_host_sync():
        t = torch.ones(())
    assert t.item() == 1.0
