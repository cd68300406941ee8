"""A device that is not the host, on a machine that has none: tensors without values, and a check of every operator.

Inside `second_device()` engines train on torch's "meta" device. Nothing is computed, but every tensor knows where it
would be, and an operator whose operands are in two places raises, as on an accelerator; only copies may cross.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sheer import device as devices

DEVICE = torch.device("meta")
_CROSSING = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class MixedDevices(AssertionError):
    """An operator was given tensors of two devices."""


class OneDeviceEach(TorchDispatchMode):
    """Refuses operators over two devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.is_set_to.default:  # which meta tensors lack
            return _same_memory(*args)
        if func is torch.ops.aten._local_scalar_dense.default:  # whoever looks at a value
            return False if args[0].dtype is torch.bool else 1.0
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func not in _CROSSING and len({tensor.device.type for tensor in tensors}) > 1:
            raise MixedDevices(f"{func}: {[(tuple(t.shape), t.device.type) for t in tensors]}")
        if func is torch.ops.aten.equal.default:
            return False
        return func(*args, **kwargs)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return address(one) == address(other) and one.shape == other.shape and one.stride() == other.stride()


def address(tensor: torch.Tensor) -> int:
    """As good as an address: tensors without memory have none."""
    return tensor.untyped_storage()._cdata * 256 + tensor.storage_offset() * tensor.element_size()


@contextmanager
def second_device() -> Iterator[None]:
    """Engines built inside train on a device that is not the host."""
    with ExitStack() as stack:

        def instead(target: str, new: Callable[..., Any]) -> None:
            stack.enter_context(mock.patch(target, new))

        stack.enter_context(FakeTensorMode())
        stack.enter_context(mock.patch.object(torch.Tensor, "data_ptr", address))
        stack.enter_context(mock.patch.object(devices, "pick", return_value=DEVICE))
        for name in ("activate", "synchronize"):
            stack.enter_context(mock.patch.object(devices, name))
        for place in ("device", "zero.flat", "zero.grads"):
            instead(f"sheer.{place}.aligned_zeros", torch.zeros)
        instead("sheer.device.pinned_zeros", torch.zeros)
        instead("sheer.comm.depots.SideStream", lambda _device: mock.Mock(after_current=nullcontext))
        instead("sheer.setup._check_model", lambda model: model)  # it refuses meta
        instead("torch.nn.Module.to", lambda module, _device: module)
        stack.enter_context(OneDeviceEach())
        yield
