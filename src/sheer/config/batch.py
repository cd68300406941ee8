"""The batch triangle: three numbers of which one or two may be left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sheer.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from sheer.config.model import Config


class BatchSizes(NamedTuple):
    """How many samples go where. Always `train == micro * accumulation * data_parallel_size`."""

    train: int
    """Samples per optimizer step, over all ranks."""
    micro: int
    """Samples per forward, on one rank."""
    accumulation: int
    """Forwards per optimizer step, on one rank."""


def resolve_batch(config: Config, data_parallel_size: int) -> BatchSizes:
    """Complete the batch triangle for this many data-parallel ranks.

    Any one or two of the three numbers may be left out, except that the accumulation alone is not enough; where it is
    left out and the other two do not say it, it is 1.

    Raises:
        ConfigError: nothing to start from, or numbers that contradict each other or do not divide; says all of them.
    """
    if data_parallel_size < 1:
        raise UsageError(f"data_parallel_size must be at least 1, not {data_parallel_size}.")
    train = config.train_batch_size
    micro = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if train is None and micro is None:
        raise ConfigError(
            f"The batch size is not given: {_numbers(config, data_parallel_size)}. "
            "Set train_micro_batch_size_per_gpu or train_batch_size to an integer of at least 1."
        )
    if micro is None:
        accumulation = accumulation or 1
        micro = (train or 0) // (accumulation * data_parallel_size)
    elif accumulation is None:
        accumulation = 1 if train is None else train // (micro * data_parallel_size)
    product = micro * accumulation * data_parallel_size
    if product == 0 or train not in (None, product):
        raise ConfigError(
            "train_batch_size must be train_micro_batch_size_per_gpu * gradient_accumulation_steps * "
            f"data-parallel size, but {_numbers(config, data_parallel_size)}. {_mend(config, data_parallel_size)}"
        )
    return BatchSizes(product, micro, accumulation)


def _numbers(config: Config, data_parallel_size: int) -> str:
    """All three numbers as given, and the number of ranks."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: getattr(config, name) for name in names}
    words = [
        f"{name} is {'auto' if name in config.auto else 'not given' if value is None else value}"
        for name, value in given.items()
    ]
    return f"{', '.join(words)}, and the data-parallel size is {data_parallel_size}"


def _mend(config: Config, data_parallel_size: int) -> str:
    """Which number would make the triangle close: the nearest possible train_batch_size, never below one step."""
    unit = (config.train_micro_batch_size_per_gpu or 1) * data_parallel_size
    steps = config.gradient_accumulation_steps
    train = config.train_batch_size or 0
    if config.train_micro_batch_size_per_gpu is not None and steps is not None:
        return f"Set train_batch_size to {unit * steps}, or leave one of the three out."
    unit *= steps or 1
    below = max(train // unit, 1) * unit
    nearest = f"{below}" if below >= train else f"{below} or {below + unit}"
    return f"Set train_batch_size to a multiple of {unit}, such as {nearest}."
