"""Layers that are not built yet: what a stage that does not hold a layer keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from sheer.errors import UsageError


class LayerSpec:
    """A layer by its class and arguments, built only where it runs.

        LayerSpec(nn.Linear, 64, 64, bias=False)

    Raises:
        UsageError: `typename` is no subclass of `torch.nn.Module`.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                f"LayerSpec takes a subclass of torch.nn.Module and its arguments, got {typename!r}; put a module that"
                " exists already, or a plain function, into the list of layers as it is"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """The layer itself, new at each call. `log` is accepted as in DeepSpeed and has no effect."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        arguments = [repr(a) for a in self.module_args] + [f"{k}={v!r}" for k, v in self.module_kwargs.items()]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *arguments])})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares parameters with every other layer of the same `key`, wherever they run.

        TiedLayerSpec("embed", nn.Embedding, 256, 64),
        ...,
        TiedLayerSpec("embed", nn.Embedding, 256, 64, forward_fn=lambda layer, x: x @ layer.weight.T)

    The first layer of a key gives the shared parameters their name and initial value; all other parameters of a tied
    layer are its own.

    Args:
        key: which layers belong together.
        forward_fn: called as `forward_fn(layer, x)` instead of `layer(x)`.
        tied_weight_attr: the shared parameters, dotted where they lie deeper. Layers of one key may name theirs
            differently: the first of each list are one parameter, the second another, and so on.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, key={self.key!r}, tied={self.tied_weight_attr})"
