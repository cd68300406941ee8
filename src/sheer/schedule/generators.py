"""Schedules by name: pure functions from numbers to a `Schedule`.

In most of them a stage takes its forwards in one order and its backwards in another, in turn; what differs is those
orders and how far the forwards are ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from sheer.errors import UsageError, did_you_mean
from sheer.schedule.plan import ENDING, Action, Kind, Schedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741 - as in the papers


class Piece(NamedTuple):
    """One micro-batch in one chunk of a stage."""

    micro_batch: int
    chunk: int = 0

    def act(self, kind: Kind) -> Action:
        """The action of this kind on it."""
        return Action(kind, *self)


def accumulate(micro_batches: int, *, first: int = 0) -> tuple[Action, ...]:
    """The actions of one step over micro-batches [first, micro_batches), on one stage.

    Gradient accumulation is a one-stage pipeline: F0 B0 F1 B1 REDUCE STEP.
    """
    if not 0 <= first < micro_batches:
        raise UsageError(f"a step of {micro_batches} micro-batches cannot start at number {first}")
    pieces = [Piece(k) for k in range(first, micro_batches)]
    return (*_in_turn(pieces, pieces, ahead=0), *ENDING)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965). Every stage holds all micro-batches."""
    _require(stages=stages, micro_batches=micro_batches)
    pieces = [Piece(k) for k in range(micro_batches)]
    every = (*_in_turn(pieces, pieces, ahead=micro_batches), *ENDING)
    return Schedule("gpipe", stages, 1, micro_batches, tuple(range(stages)), (every,) * stages)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503).

    Takes as long as GPipe; stage s holds min(stages - s, micro_batches) micro-batches at most.
    """
    _require(stages=stages, micro_batches=micro_batches)
    pieces = [Piece(k) for k in range(micro_batches)]
    actions = [(*_in_turn(pieces, pieces, ahead=stages - stage - 1), *ENDING) for stage in range(stages)]
    return Schedule("1f1b", stages, 1, micro_batches, tuple(range(stages)), tuple(actions))


def interleaved(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B with `chunks` pieces of the model on each stage (Narayanan et al. 2021, arXiv:2104.04473).

    Idle for (stages - 1) / (chunks * micro_batches + stages - 1) of the step; it pays with more messages and with more
    activations held. With fewer micro-batches than stages it idles longer. One chunk is 1F1B.
    """
    _require(stages=stages, micro_batches=micro_batches, chunks=chunks)
    if chunks == 1:
        return replace(one_f_one_b(stages, micro_batches), name="interleaved")
    rounds = _rounds(stages, micro_batches)
    forwards, backwards = _pieces(rounds, range(chunks)), _pieces(rounds, range(chunks - 1, -1, -1))
    ahead = [(chunks - 1) * len(rounds[0]) + 2 * (stages - stage - 1) for stage in range(stages)]
    actions = tuple((*_in_turn(forwards, backwards, ahead=some), *ENDING) for some in ahead)
    return Schedule("interleaved", stages, chunks, micro_batches, tuple(range(stages)) * chunks, actions)


def zero_bubble(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """ZB-H1 (Qi et al. 2023, arXiv:2401.10241): backwards in halves, so that the halves nobody waits for fill gaps.

    1F1B's order; stage s puts off the gradients of weights by s pieces, so every stage holds as many micro-batches as
    1F1B's first. A stage idles for (stages - 1)(F + I - W), with 1F1B for (stages - 1)(F + I + W). With more than one
    chunk, interleaved.
    """
    _require(stages=stages, micro_batches=micro_batches, chunks=chunks)
    rounds = _rounds(stages, micro_batches)
    forwards, backwards = _pieces(rounds, range(chunks)), _pieces(rounds, range(chunks - 1, -1, -1))
    actions = []
    for stage in range(stages):
        ahead = (chunks - 1) * len(rounds[0]) + stages - stage - 1
        order = _in_turn(forwards, backwards, ahead=ahead, backward=I)
        actions.append((*_with_weights(order, late=stage), *ENDING))
    return Schedule("zero-bubble", stages, chunks, micro_batches, tuple(range(stages)) * chunks, tuple(actions))


def zero_bubble_v(stages: int, micro_batches: int) -> Schedule:
    """ZB-V (Qi et al. 2023, arXiv:2401.10241, section 6): two chunks a stage, placed there and back again.

    The first stage holds both ends of the model. Where F, I and W take equal time, a stage that has begun never waits;
    it holds no more than 1F1B's first: 2 * stages pieces of half the size.
    """
    _require(stages=stages, micro_batches=micro_batches)
    placement = (*range(stages), *reversed(range(stages)))
    actions = [(*_there_and_back(stages, stage, micro_batches), *ENDING) for stage in range(stages)]
    return Schedule("zb-v", stages, 2, micro_batches, placement, tuple(actions))


def forward_only(stages: int, micro_batches: int, *, placement: tuple[int, ...] | None = None) -> Schedule:
    """Forwards alone, for evaluation: nothing is kept, reduced or updated.

    Chunks take turns every `stages` micro-batches, which keeps all stages busy under any placement.
    """
    placement = tuple(range(stages)) if placement is None else placement
    _require(stages=stages, micro_batches=micro_batches)
    chunks = len(placement) // stages
    every = tuple(piece.act(F) for piece in _pieces(_rounds(stages, micro_batches), range(chunks)))
    return Schedule("forward-only", stages, chunks, micro_batches, placement, (every,) * stages)


def _in_turn(
    forwards: Sequence[Piece], backwards: Sequence[Piece], *, ahead: int, backward: Kind = B
) -> Iterator[Action]:
    """Forwards and backwards in turn, the forwards `ahead` by so many, or by all there are; at the ends one alone."""
    ahead = min(ahead, len(forwards))
    for position in range(len(forwards) + ahead):
        if position < len(forwards):
            yield forwards[position].act(F)
        if position >= ahead:
            yield backwards[position - ahead].act(backward)


def _with_weights(order: Iterable[Action], *, late: int) -> Iterator[Action]:
    """`order` with the W of each I, `late` other Is after it, or at the end."""
    waiting: list[Action] = []
    for action in order:
        yield action
        if action.kind is I:
            waiting.append(action._replace(kind=W))
            if len(waiting) > late:
                yield waiting.pop(0)
    yield from waiting


def _there_and_back(stages: int, stage: int, micro_batches: int) -> Iterator[Action]:
    """One stage of ZB-V. Which micro-batch an entry means follows by counting; a step too short to fill the pipeline is
    a longer one with the rest left out."""
    count = max(micro_batches, 2 * stages - 1)
    left = stages - stage  # stages from here to the turn, this one included
    first, second = [(F, 0), (I, 0), (W, 0)], [(F, 1), (I, 1), (W, 1)]
    pattern = [(F, 0)] * (2 * left - 1) + [(F, 1), (F, 0)] * stage + second * left  # until the first gradient is back
    pattern += (first + second) * (count - stages - left + 1) + (first[1:] + second) * (left - 1)
    pattern += [(I, 0), (I, 1)] * stage + [(I, 0), (W, 0)] * left + [(W, 1)] * stage + [(W, 0)] * stage
    seen: Counter[tuple[Kind, int]] = Counter()
    for kind, chunk in pattern:
        micro_batch = seen[kind, chunk]
        seen[kind, chunk] += 1
        if micro_batch < micro_batches:
            yield Action(kind, micro_batch, chunk)


def _rounds(stages: int, micro_batches: int) -> list[range]:
    """All micro-batches, cut into runs of at least `stages` (one run, if there are fewer), as equal as can be."""
    count = max(1, micro_batches // stages)
    bounds = [-(-micro_batches * k // count) for k in range(count + 1)]  # rounded up: no round is longer than the first
    return [range(bounds[k], bounds[k + 1]) for k in range(count)]


def _pieces(rounds: Sequence[range], chunks: range) -> list[Piece]:
    """The pieces of a stage, round by round; within a round chunk by chunk."""
    return [Piece(k, chunk) for some in rounds for chunk in chunks for k in some]


def _require(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise UsageError(f"a schedule needs {name} of at least 1, not {value}")


class Named(NamedTuple):
    """A generator that can be asked for by name."""

    make: Callable[[int, int, int], Schedule]
    """From stages, micro-batches and chunks."""
    chunks: int
    """Chunks of a stage where none are asked for."""
    fixed: bool = True
    """Whether no other number of chunks will do."""


GENERATORS: Mapping[str, Named] = MappingProxyType(
    {
        "gpipe": Named(lambda stages, count, _: gpipe(stages, count), 1),
        "1f1b": Named(lambda stages, count, _: one_f_one_b(stages, count), 1),
        "interleaved": Named(interleaved, 2, fixed=False),
        "zero-bubble": Named(zero_bubble, 1, fixed=False),
        "zb-v": Named(lambda stages, count, _: zero_bubble_v(stages, count), 2),
        "forward-only": Named(
            lambda stages, count, chunks: forward_only(stages, count, placement=tuple(range(stages)) * chunks),
            1,
            fixed=False,
        ),
    }
)
"""Every schedule that has a name."""


def by_name(name: str, stages: int, micro_batches: int, *, chunks: int | None = None) -> Schedule:
    """The schedule called `name`, a key of `GENERATORS`. Raises UsageError where the name or the chunks do not fit."""
    if name not in GENERATORS:
        raise UsageError(
            f"there is no schedule '{name}'; there are {', '.join(GENERATORS)}.{did_you_mean(name, GENERATORS)}"
        )
    named = GENERATORS[name]
    if named.fixed and chunks not in (None, named.chunks):
        others = ", ".join(key for key, other in GENERATORS.items() if not other.fixed)
        raise UsageError(f"'{name}' has {named.chunks} chunks a stage, not {chunks}; any number works with {others}")
    return named.make(stages, micro_batches, named.chunks if chunks is None else chunks)
