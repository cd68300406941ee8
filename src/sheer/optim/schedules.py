"""Learning-rate schedules by name: DeepSpeed's five, any torch scheduler, or an import path.

DeepSpeed's five count iterations from -1, the value before the first `step()`: the first optimizer step uses the
learning rate of iteration -1, the second that of iteration 0. All are closed forms of the iteration, so the whole
state is one number. Formulas and defaults agree with DeepSpeed 0.19.
"""

from __future__ import annotations

import enum
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from sheer.errors import ConfigError, did_you_mean
from sheer.optim.named import check_params, import_object, without_auto

PerGroup = float | Sequence[float]
"""One number for all parameter groups, or one for each."""

# A momentum of 1 or more diverges; a growing OneCycle momentum stops here.
_MOMENTUM_CEILING = 0.999


class Values(NamedTuple):
    """What a schedule sets in one parameter group."""

    lr: float
    momentum: float | None = None
    """Momentum, or Adam's beta1; None leaves it alone."""


class Warmup(enum.Enum):
    """How a warmup rises from 0 to 1."""

    LOG = "log"
    """log(i + 1) / log(n): steep first."""
    LINEAR = "linear"
    """i / n."""


class Schedule(LRScheduler):
    """A closed form of the iteration that writes into the optimizer's own group dicts; base of DeepSpeed's five.

    Subclasses give `values_at`; everything else is final. `step(i)` jumps to iteration `i`.
    """

    def __init__(self, optimizer: Optimizer, *, last_batch_iteration: int) -> None:
        # Not LRScheduler.__init__: it replaces `optimizer.step` by a counting wrapper and steps once, and both are
        # only for torch's own way of counting.
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        self._group_lrs = [float(group["initial_lr"]) for group in optimizer.param_groups]
        self.base_lrs = list(self._group_lrs)
        self.last_epoch = last_batch_iteration
        self._write()

    @abstractmethod
    def values_at(self, iteration: int) -> list[Values]:
        """What every parameter group has at `iteration` (-1 is before the first step)."""

    @property
    def last_batch_iteration(self) -> int:
        """Iterations stepped so far, minus one (DeepSpeed's name for torch's `last_epoch`)."""
        return self.last_epoch

    def get_lr(self) -> list[float | torch.Tensor]:
        """The learning rate of each group at the current iteration."""
        return [values.lr for values in self.values_at(self.last_epoch)]

    def step(self, i: int | None = None) -> None:
        """Go to the next iteration, or to iteration `i`, and set the groups accordingly."""
        self.last_epoch = self.last_epoch + 1 if i is None else i
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """The iteration: `{"last_batch_iteration": int}`."""
        return {"last_batch_iteration": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved iteration and set the groups accordingly, with this run's parameters of the schedule."""
        self.step(int(state_dict["last_batch_iteration"]))

    def _write(self) -> None:
        now = self.values_at(self.last_epoch)
        for group, values in zip(self.optimizer.param_groups, now, strict=True):
            _set(group, "lr", values.lr)
            if values.momentum is not None and "betas" in group:
                group["betas"] = (values.momentum, *group["betas"][1:])
            elif values.momentum is not None and group.get("momentum"):
                group["momentum"] = values.momentum
        self._last_lr = [values.lr for values in now]

    def _per_group(self, value: PerGroup, *, name: str) -> list[float]:
        """`value` for every group. ConfigError when a list has another length."""
        groups = len(self._group_lrs)
        if not isinstance(value, Sequence):
            return [value] * groups
        if len(value) != groups:
            raise ConfigError(
                f"{name}={value!r} has {len(value)} entries, the optimizer has {groups} parameter groups. Give one "
                "number for all groups, or one for each."
            )
        return list(value)


class _BoundedWarmup(Schedule):
    """Between `warmup_min_lr` and `warmup_max_lr` (None: the group's own lr), by a fraction of the iteration."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_min_lr: PerGroup,
        warmup_max_lr: PerGroup | None,
        warmup_num_steps: int,
        warmup_type: str,
        last_batch_iteration: int,
    ) -> None:
        self._bounds = (warmup_min_lr, warmup_max_lr)
        self._steps = _positive(warmup_num_steps, name="warmup_num_steps")
        self._kind = _warmup(warmup_type)
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    @abstractmethod
    def _fraction(self, iteration: int) -> float:
        """0 is the lower bound, 1 the upper."""

    def values_at(self, iteration: int) -> list[Values]:
        """The fraction's place between the bounds, for each group."""
        fraction = self._fraction(iteration)
        low, high = self._bounds
        lows = self._per_group(low, name="warmup_min_lr")
        highs = self._group_lrs if high is None else self._per_group(high, name="warmup_max_lr")
        return [Values(a + (b - a) * fraction) for a, b in zip(lows, highs, strict=True)]


class WarmupLR(_BoundedWarmup):
    """Rise from `warmup_min_lr` to `warmup_max_lr` (None: the group's own lr) in `warmup_num_steps`, then stay."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(
            optimizer,
            warmup_min_lr=warmup_min_lr,
            warmup_max_lr=warmup_max_lr,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )

    def _fraction(self, iteration: int) -> float:
        return _risen(iteration, self._steps, self._kind)


class WarmupDecayLR(_BoundedWarmup):
    """Rise as `WarmupLR`, then fall linearly to `warmup_min_lr` at iteration `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = _positive(total_num_steps, name="total_num_steps")
        super().__init__(
            optimizer,
            warmup_min_lr=warmup_min_lr,
            warmup_max_lr=warmup_max_lr,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )

    def _fraction(self, iteration: int) -> float:
        if iteration < self._steps:
            return _risen(iteration, self._steps, self._kind)
        return max(0.0, (self._total - iteration) / max(1, self._total - self._steps))


class WarmupCosineLR(Schedule):
    """Rise from `warmup_min_ratio` to 1 times the group's own lr, then fall to `cos_min_ratio` of it along a cosine.

    Iteration -1 is 0 whatever `warmup_min_ratio` is, as in DeepSpeed. The cosine is that of SGDR (Loshchilov and
    Hutter 2017, arXiv 1608.03983) without restarts.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = _positive(total_num_steps, name="total_num_steps")
        self._steps = _positive(warmup_num_steps, name="warmup_num_steps")
        self._min_ratios = (warmup_min_ratio, cos_min_ratio)
        self._kind = _warmup(warmup_type)
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def values_at(self, iteration: int) -> list[Values]:
        """The ratio of this iteration, times each group's own lr."""
        ratio = self._ratio(iteration)
        return [Values(base * ratio) for base in self._group_lrs]

    def _ratio(self, iteration: int) -> float:
        warmup_min, cosine_min = self._min_ratios
        if iteration < 0:
            return 0.0
        if iteration < self._steps:
            return warmup_min + (1.0 - warmup_min) * _risen(iteration, self._steps, self._kind)
        progress = min(1.0, (iteration - self._steps + 1) / max(1, self._total - self._steps))
        return cosine_min + (1.0 - cosine_min) * (1.0 + math.cos(math.pi * progress)) / 2.0


class OneCycle(Schedule):
    """One triangle from `cycle_min_lr` to `cycle_max_lr` and back, momentum the other way round, then a decay.

    Smith 2018 (arXiv 1803.09820). With a stair count, each half moves in that many stairs. After the cycle the lr is
    `cycle_min_lr / (1 + decay_lr_rate * decays)` and the momentum `cycle_max_mom * (1 + decay_mom_rate * decays)`,
    where `decays` counts `decay_step_size` iterations (0: no decay). Momentum means Adam's beta1, or the `momentum` of
    groups where it is not 0.

    Three choices differ from DeepSpeed's, on momentum only: beta2 stays the group's own instead of becoming 0.99,
    iteration -1 follows the same formula as the others, and momentum stays below 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        first = _positive(cycle_first_step_size, name="cycle_first_step_size")
        second = first if cycle_second_step_size is None else cycle_second_step_size
        self._sizes = (first, _positive(second, name="cycle_second_step_size"))
        same_stairs = cycle_second_stair_count is None
        self._stairs = (cycle_first_stair_count, cycle_first_stair_count if same_stairs else cycle_second_stair_count)
        self._lrs = (cycle_min_lr, cycle_max_lr)
        self._momenta = (cycle_min_mom, cycle_max_mom) if cycle_momentum else None
        self._decay_every = decay_step_size
        self._decay_rates = (decay_lr_rate, decay_mom_rate)
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def values_at(self, iteration: int) -> list[Values]:
        """Height in the cycle, or decay after it, applied to each group's bounds."""
        height, decays = self._height(iteration + 1), self._decays(iteration + 1)
        lr_rate, momentum_rate = self._decay_rates
        lows = self._per_group(self._lrs[0], name="cycle_min_lr")
        highs = self._per_group(self._lrs[1], name="cycle_max_lr")
        momentum = None
        if self._momenta is not None:
            least, most = self._momenta
            grown = (most - (most - least) * height) * (1.0 + momentum_rate * decays)
            momentum = min(grown, max(most, _MOMENTUM_CEILING))
        return [
            Values((low + (high - low) * height) / (1.0 + lr_rate * decays), momentum)
            for low, high in zip(lows, highs, strict=True)
        ]

    def _height(self, steps: int) -> float:
        """0 at the cycle's start and from its end on, 1 at its top."""
        first, second = self._sizes
        if steps <= first:
            return _stair(steps, first, self._stairs[0])
        return _stair(max(0, first + second - steps), second, self._stairs[1])

    def _decays(self, steps: int) -> float:
        return max(0, steps - sum(self._sizes)) / self._decay_every if self._decay_every else 0.0


class LRRangeTest(Schedule):
    """Grow from `lr_range_test_min_lr` by `lr_range_test_step_rate` times it every step size, to find usable rates.

    Smith 2017 (arXiv 1506.01186). With `lr_range_test_staircase` it grows in stairs.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._min_lr = lr_range_test_min_lr
        self._size = _positive(lr_range_test_step_size, name="lr_range_test_step_size")
        self._rate = lr_range_test_step_rate
        self._staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def values_at(self, iteration: int) -> list[Values]:
        """The least lr of each group, times 1 + rate * intervals."""
        steps = iteration + 1
        intervals = steps // self._size if self._staircase else steps / self._size
        lows = self._per_group(self._min_lr, name="lr_range_test_min_lr")
        return [Values(low * (1.0 + self._rate * intervals)) for low in lows]


_OURS: Mapping[str, type[Schedule]] = {
    one.__name__: one for one in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}

_NOT_BY_NAME = {
    "LambdaLR": "it needs a function, which a config cannot hold",
    "MultiplicativeLR": "it needs a function, which a config cannot hold",
    "SequentialLR": "it is made of other schedulers, which a config cannot hold",
    "ChainedScheduler": "it is made of other schedulers, which a config cannot hold",
    "ReduceLROnPlateau": "its step needs a metric, which the engine does not have",
}


def build_scheduler(type_name: str, params: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """The schedule `type_name` over `optimizer`: one of DeepSpeed's five, a torch scheduler, or an import path.

    It works on `optimizer.param_groups` in place and has written the first learning rate when this returns. Parameters
    left at "auto" take their defaults. ConfigError, naming the key, for a name, parameter or value that is not known.
    """
    build = _find(type_name)
    given = without_auto(params)
    check_params(build, given, key="scheduler.params", reserved=frozenset({"optimizer"}))
    try:
        return build(optimizer, **given)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"scheduler.params: {type_name} cannot be built with {given}: {error}") from error


def _find(type_name: str) -> Any:
    if "." in type_name:
        return import_object(type_name, key="scheduler.type")
    known = {**_torch_schedulers(), **_OURS}
    by_folded = {name.lower(): name for name in known}
    name = by_folded.get(type_name.lower())
    if name is None:
        raise ConfigError(
            f"scheduler.type={type_name!r} is not known. Allowed are {', '.join(_OURS)}, any class of "
            "torch.optim.lr_scheduler, or an import path 'package.module.Name'."
            f"{did_you_mean(type_name, known)}"
        )
    if name in _NOT_BY_NAME:
        raise ConfigError(
            f"scheduler.type={type_name!r} cannot be built from a config: {_NOT_BY_NAME[name]}. Build it yourself and "
            "pass it (or a function of the optimizer that returns it) as lr_scheduler."
        )
    return known[name]


def _torch_schedulers() -> dict[str, type[LRScheduler]]:
    return {
        name: one
        for name, one in vars(lr_scheduler).items()
        if isinstance(one, type) and issubclass(one, LRScheduler) and one is not LRScheduler and name[0] != "_"
    }


def _set(group: dict[str, Any], name: str, value: float) -> None:
    """Write into the group; a tensor (an lr that lives on the device) keeps its identity."""
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def _risen(iteration: int, steps: int, kind: Warmup) -> float:
    """The warmup's fraction, 0 at its start (and before), 1 from `steps` on."""
    if iteration >= steps:
        return 1.0
    if iteration < 0:
        return 0.0
    # At least 2, so that a warmup of one step does not divide by log(1) = 0.
    span = max(2, steps)
    return math.log(iteration + 1) / math.log(span) if kind is Warmup.LOG else iteration / span


def _stair(steps: int, size: int, stairs: int | None) -> float:
    """`steps / size`, rounded down to one of `stairs` stairs where there are any."""
    return (steps * stairs // size) / stairs if stairs else steps / size


def _positive(value: int, *, name: str) -> int:
    if value <= 0:
        raise ConfigError(f"{name}={value!r}: a number of steps above 0 is needed.")
    return value


def _warmup(name: str) -> Warmup:
    allowed = [kind.value for kind in Warmup]
    if name not in allowed:
        raise ConfigError(f"warmup_type={name!r}: allowed are {', '.join(map(repr, allowed))}.")
    return Warmup(name)
