"""What a step costs as a multiple of the same loop without communication: ours and every peer's, in turns."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from benchmarks.contenders import CONTENDERS, RAW, chosen
from benchmarks.equal import TOLERANCE, checked_steps, difference, expected
from benchmarks.report import Bar, Result, Spread, table
from benchmarks.ring import FailedError, Ring
from benchmarks.workloads import make


class Race(NamedTuple):
    """One table."""

    workload: str
    ranks: int = 2
    compiled: bool = False
    accumulation: int = 1
    rounds: int = 15
    steps: int = 2
    """Per turn."""
    seconds: float = float("inf")
    """Of the rounds alone, without setting up: after that no further round, but at least two."""


class Course:
    """All contenders of one race, those that are out included."""

    def __init__(self, race: Race, names: list[str]) -> None:
        self.race = race
        self.rings: dict[str, Ring] = {}
        self.turns: dict[str, list[Any]] = {name: [] for name in names}
        self.out: dict[str, str] = {}
        self.differs: dict[str, float] = {}
        for name in names:
            if CONTENDERS[name].installed:
                self.rings[name] = Ring(name, ranks=race.ranks)
            else:
                self.out[name] = "not installed"

    def _each(self, what: Any) -> None:
        for name, ring in list(self.rings.items()):
            try:
                what(name, ring)
            except FailedError as error:
                self.drop(name, f"failed: {error}")
                print(f"{name} failed; its ranks printed:\n{ring.printed()[-3000:]}")

    def drop(self, name: str, why: str) -> None:
        self.out[name] = why
        self.rings.pop(name).stop()

    def build(self) -> None:
        race = self.race
        self._each(
            lambda _, ring: ring.build(workload=race.workload, compiled=race.compiled, accumulation=race.accumulation)
        )

    def check(self) -> None:
        """The same losses on every rank as one plain process has; whoever differs is out."""
        race = self.race
        common = expected(race.workload, ranks=race.ranks, accumulation=race.accumulation)
        alone = [
            expected(race.workload, ranks=race.ranks, accumulation=race.accumulation, alone=rank)[0]
            for rank in range(race.ranks)
        ]

        def one(name: str, ring: Ring) -> None:
            wanted = common if CONTENDERS[name].communicates else alone
            found = ring.turn(checked_steps(race.workload)).losses
            self.differs[name] = max(difference(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
            if not self.differs[name] <= TOLERANCE:
                self.drop(name, f"invalid: losses differ by {self.differs[name]:.1e}")

        self._each(one)

    def run(self) -> None:
        def one(name: str, ring: Ring) -> None:
            self.turns[name].append(ring.turn(self.race.steps))

        begin = time.perf_counter()
        for done in range(self.race.rounds):
            if done >= 2 and time.perf_counter() - begin > self.race.seconds:
                break
            self._each(one)

    def stop(self) -> None:
        for ring in self.rings.values():
            ring.stop()


def run(race: Race, *, only: tuple[str, ...] = (), quick: bool = False) -> Result:
    """All contenders, interleaved."""
    course = Course(race, chosen(only, quick=quick, ranks=race.ranks))
    try:
        course.build()
        course.check()
        course.run()
    finally:
        course.stop()
    return _result(course)


def _result(course: Course) -> Result:
    race = course.race
    if RAW in course.out:
        raise SystemExit(f"the raw loop itself: {course.out[RAW]}")
    base = course.turns[RAW]
    unit = 4 * sum(p.numel() for p in make(race.workload).model.parameters()) * (race.ranks - 1) / race.ranks
    rows, bars = [], []
    for name, turns in course.turns.items():
        note = CONTENDERS[name].note
        if name in course.out:
            rows.append([name, course.out[name], "", "", "", "", "", note])
            continue
        spread = Spread.of([turn.seconds / raw.seconds for turn, raw in zip(turns, base, strict=True)])
        busy = Spread.of([turn.busy / raw.busy for turn, raw in zip(turns, base, strict=True)]).median
        figures = [
            f"{spread.median:.3f}",
            f"{spread.low:.3f} - {spread.high:.3f}",
            f"{busy:.3f}",
            f"{Spread.of([turn.seconds for turn in turns]).median * 1e3:.1f}",
            f"{max(turn.sent for turn in turns) / unit:.3f}" if unit else "",
            f"{course.differs[name]:.0e}",
        ]
        rows.append([name, *figures, note])
        bars.append(Bar(name, spread, CONTENDERS[name].ours))
    header = ["contender", "x raw loop", "10 - 90 %", "x CPU time", "ms per step", "sent", "losses differ", "runs"]
    lines = [
        f"{len(base)} rounds of {race.steps} steps, {race.ranks} ranks, {'compiled' if race.compiled else 'eager'}, "
        f"accumulation {race.accumulation}.",
        "",
        *table(header, rows),
    ]
    samples = {name: [turn._asdict() for turn in turns] for name, turns in course.turns.items()}
    return Result(lines, samples, tuple(bars), tuple(course.out))
