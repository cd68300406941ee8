"""Schedules by name: pure functions from numbers to a `Schedule`."""

from __future__ import annotations

from collections.abc import Iterator

from sheer.errors import UsageError
from sheer.schedule.plan import ENDING, Action, Kind, Schedule

F, B = Kind.FORWARD, Kind.BACKWARD


def accumulate(micro_batches: int, *, first: int = 0) -> tuple[Action, ...]:
    """The actions of one step over micro-batches [first, micro_batches), on one stage.

    Gradient accumulation is a one-stage pipeline: F0 B0 F1 B1 REDUCE STEP.
    """
    if not 0 <= first < micro_batches:
        raise UsageError(f"a step of {micro_batches} micro-batches cannot start at number {first}")
    body = [Action(kind, k) for k in range(first, micro_batches) for kind in (F, B)]
    return (*body, *ENDING)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965). Every stage holds all micro-batches."""
    _require(stages=stages, micro_batches=micro_batches)
    every = tuple(Action(kind, k) for kind in (F, B) for k in range(micro_batches))
    return Schedule("gpipe", stages, 1, micro_batches, tuple(range(stages)), ((*every, *ENDING),) * stages)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503).

    Takes as long as GPipe; stage s holds min(stages - s, micro_batches) micro-batches at most.
    """
    _require(stages=stages, micro_batches=micro_batches)
    actions = tuple(
        (*_alternate(micro_batches, ahead=min(stages - stage - 1, micro_batches)), *ENDING) for stage in range(stages)
    )
    return Schedule("1f1b", stages, 1, micro_batches, tuple(range(stages)), actions)


def forward_only(stages: int, micro_batches: int, *, placement: tuple[int, ...] | None = None) -> Schedule:
    """Forwards alone, for evaluation: nothing is kept, reduced or updated.

    Chunks take turns every `stages` micro-batches, which keeps all stages busy under any placement.
    """
    placement = tuple(range(stages)) if placement is None else placement
    _require(stages=stages, micro_batches=micro_batches)
    chunks = len(placement) // stages
    rounds = [range(k, min(k + stages, micro_batches)) for k in range(0, micro_batches, stages)]
    every = tuple(Action(F, k, chunk) for some in rounds for chunk in range(chunks) for k in some)
    return Schedule("forward-only", stages, chunks, micro_batches, placement, (every,) * stages)


def _alternate(count: int, *, ahead: int) -> Iterator[Action]:
    """Forwards and backwards in turn, the forwards `ahead` by so many; at the ends, one kind alone."""
    for k in range(count + ahead):
        if k < count:
            yield Action(F, k)
        if k >= ahead:
            yield Action(B, k - ahead)


def _require(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise UsageError(f"a schedule needs {name} of at least 1, not {value}")
