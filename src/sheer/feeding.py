"""How the engine gets its micro-batches, hands them to the module, and finds the loss in what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from sheer.data import ResumableLoader, build_loader
from sheer.errors import DataError, UsageError

if TYPE_CHECKING:
    from sheer.comm import Axis
    from sheer.config import Config


def loader(
    dataset: Any,
    *,
    config: Config,
    axis: Axis,
    micro_batch: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **other: Any,
) -> ResumableLoader:
    """This rank's loader over `dataset` as `config` says; `other` arguments of `build_loader` go before it."""
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise DataError(
            "training_data must be a data set, not a DataLoader: the engine makes the loader, and shards it. Pass "
            "loader.dataset, and its collate_fn if it has one; or iterate your own loader and leave training_data out"
        )
    section = config.data_loader
    asked = {
        "shuffle": section.shuffle,
        "seed": section.seed,
        "drop_last": config.dataloader_drop_last,
        "num_workers": section.num_workers,
        "pin_memory": section.pin_memory,
    }
    return build_loader(
        dataset, micro_batch=micro_batch, rank=axis.rank, world=axis.size, collate_fn=collate_fn, **{**asked, **other}
    )


def checked(data_iter: Iterator[Any]) -> Iterator[Any]:
    """`data_iter`, if it is one: a collection would start anew at every step."""
    if not isinstance(data_iter, Iterator):
        raise DataError(
            "train_batch needs an iterator, so that the next call goes on where this one ends; "
            f"{type(data_iter).__name__} would start anew each time. Pass iter(loader) once."
        )
    return data_iter


def endless(loader: ResumableLoader | None) -> Iterator[Any]:
    """The epochs of the engine's own loader, one after the other."""
    if loader is None:
        raise DataError("train_batch() without an iterator needs training_data given to sheer.initialize")
    return _epochs(loader)


def _epochs(loader: ResumableLoader) -> Iterator[Any]:
    while True:
        yield from loader


def next_batch(batches: Iterator[Any], *, done: int, of: int) -> Any:
    """The next micro-batch; StopIteration says how many of the step's are accumulated."""
    try:
        return next(batches)
    except StopIteration:
        raise StopIteration(
            f"the data ended with {done} of {of} micro-batches of a step accumulated"
            + ("; engine.flush() applies them" if done else "")
        ) from None


def note_dtypes(error: RuntimeError, inputs: Any, *, config: Config) -> None:
    """Add to an error about dtypes which inputs have not that of the parameters, which the engine cast."""
    section = config.low_precision
    if section is None or "dtype" not in str(error):
        return
    cast = "torch.bfloat16" if section == "bf16" else "torch.float16"
    leaves = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
    other = sorted({str(leaf.dtype) for leaf in leaves} - {cast})
    if other:
        error.add_note(
            f"sheer: {section} casts the parameters to {cast}; inputs come as they are, here with {', '.join(other)}. "
            'Cast them, or use "torch_autocast" instead, which leaves parameters alone.'
        )


def call(function: Callable[..., Any], batch: Any) -> Any:
    """A tuple as positional arguments, a mapping as keywords, anything else as the one argument."""
    if isinstance(batch, Mapping):
        return function(**batch)
    return function(*batch) if isinstance(batch, tuple) else function(batch)


def loss_of(output: Any) -> Any:
    """The loss in a module's output: the output itself, its `.loss`, or its "loss"."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    loss = getattr(output, "loss", None)
    if loss is None:
        raise UsageError(
            f"train_batch needs a module that returns its loss (a scalar tensor, or something with .loss or ['loss']); "
            f"it returned {type(output).__name__}"
        )
    return loss
