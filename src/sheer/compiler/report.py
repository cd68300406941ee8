"""What compiling did: graphs, breaks with their place, recompiles with their guard, seconds, and what runs eagerly."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sheer.compiler.outside import Outside
from sheer.compiler.page import render
from sheer.compiler.records import (
    Break,
    Fallback,
    Graph,
    Group,
    Mark,
    Origin,
    Place,
    Recompile,
    Records,
    break_of,
    graph_of,
    place_of,
    recompile_of,
)
from sheer.observe import Teller

# A new batch size makes torch compile once for that size and once for all sizes; more than that is worth a word.
_USUAL_RECOMPILES = 3
# Raised with every new report, so that a tool (`sheer compile-report`) finds those of a program it runs.
AUDIT_EVENT = "sheer.compile_report"


class Report:
    """What compiling has done so far. A live object: ask it at any time; `print(report)` shows it as text."""

    def __init__(
        self, targets: tuple[str, ...], *, teller: Teller, survey: Callable[[tuple[str, ...]], Outside | None]
    ) -> None:
        self.targets = targets
        """FQNs of the modules to compile; `""` is the whole one."""
        self.groups: tuple[Group, ...] = ()
        """The targets by what they share."""
        self.active = False
        """Whether compiling is switched on."""
        self.compiled: list[Graph] = []
        """Forward graphs compiled so far, resumed pieces after a break included."""
        self.breaks: list[Break] = []
        self.recompiles: list[Recompile] = []
        self.fallbacks: list[Fallback] = []
        self._seconds = 0.0
        self._compile_ids: set[str] = set()
        self._backwards: dict[tuple[str, int], Any] = {}
        self._since_us = time.time_ns() // 1000
        self._records: Records | None = None
        self._backward_due = False
        self._teller = teller
        self._survey = survey
        self._outside = Outside()
        sys.audit(AUDIT_EVENT, self)

    @property
    def graphs(self) -> int:
        """Number of forward graphs compiled so far."""
        return len(self.compiled)

    @property
    def seconds(self) -> float:
        """Wall seconds spent compiling, graphs of the backward included."""
        self._add_backwards()
        return self._seconds + sum(
            m.entire_frame_compile_time_s or (m.duration_us or 0) / 1e6 for m in self._backwards.values()
        )

    @property
    def cache_hits(self) -> int:
        """How often generated code was found in inductor's cache instead of being generated; 0 with other backends."""
        self._add_backwards()
        backwards = sum(m.inductor_fx_local_cache_hit_count or 0 for m in self._backwards.values())
        return sum(graph.cache_hits for graph in self.compiled) + backwards

    @property
    def cache_misses(self) -> int:
        """How often inductor had to generate code."""
        self._add_backwards()
        backwards = sum(m.inductor_fx_local_cache_miss_count or 0 for m in self._backwards.values())
        return sum(graph.cache_misses for graph in self.compiled) + backwards

    @property
    def outside(self) -> Outside:
        """Hooks, entry points and modules that are not part of any graph; as last seen, if the model is gone."""
        found = self._survey(self.targets)
        if found is not None:
            self._outside = found
        return self._outside

    def html(self, path: str | Path, *, title: str = "Compile report") -> Path:
        """Write the report as one page that needs nothing else, to be opened in a browser; gives the path."""
        path = Path(path)
        path.write_text(render([self], title=title), encoding="utf-8")
        return path

    def read(self, origin: Origin, *, mark: Mark, records: Records) -> int:
        """Take in what dynamo recorded since `mark`, in a call of a target; gives the number of new graphs."""
        self._add_backwards()
        self._records = records
        compiles = [m for m in records.compiles_since(mark.time_us) if m.is_forward is not False]
        before = len(self.compiled)
        for metrics in compiles:
            self._seconds += metrics.entire_frame_compile_time_s or 0.0
            self._compile_ids.add(metrics.compile_id)
            if metrics.recompile_reason:
                self._add_recompile(recompile_of(origin, metrics), graphs=metrics.cache_size or 0)
            if metrics.fail_type is not None:
                self._add_failure(origin, metrics)
            if metrics.has_guarded_code and metrics.graph_op_count:
                self.compiled.append(graph_of(origin, metrics))
        for reason in records.breaks_since(mark):
            self._add_break(break_of(origin.target, reason))
        self._backward_due = True
        self._outside = self.outside
        return len(self.compiled) - before

    def settle(self) -> None:
        """Take in the backward graphs compiled since, before torch forgets them. Cheap where nothing is due."""
        if self._backward_due:
            self._add_backwards()
            self._backward_due = False

    def add_fallback(self, target: str, *, reason: str, mend: str = "") -> None:
        """Note that `target` runs eagerly, and say so the first time it happens for this reason."""
        fallback = Fallback(target, reason, mend)
        if fallback not in self.fallbacks:
            self.fallbacks.append(fallback)
        self._teller.warn_once(
            f"compile-eager:{reason}", f"compile: {shown(target)} runs eagerly: {_end(reason, mend)}"
        )

    def fell_back(self, target: str) -> bool:
        """Whether any fallback of `target` is known."""
        return any(fallback.target == target for fallback in self.fallbacks)

    def __str__(self) -> str:
        cache = f"; cache: {self.cache_hits} found, {self.cache_misses} made" * bool(
            self.cache_hits + self.cache_misses
        )
        lines = [
            f"compile: {'on' if self.active else 'off'}, {_count(self.graphs, 'graph')} in {self.seconds:.1f} s{cache}"
        ]
        for group in self.groups:
            lines.append(f"  targets     {len(group.targets)} x {group.kind}: {_few(group.targets)}")
        if not self.groups:
            lines.append(f"  targets     {_few(self.targets)}")
        lines += [f"  break       {b.place} ({shown(b.target)}): {b.reason}" for b in self.breaks]
        lines += [f"  recompile   {_times(n)}{shown(r.target)}: {r.guard}" for r, n in Counter(self.recompiles).items()]
        lines += [f"  runs eagerly  {shown(f.target)}: {_end(f.reason, f.mend)}" for f in self.fallbacks]
        return "\n".join(lines)

    def _add_recompile(self, found: Recompile, *, graphs: int) -> None:
        self.recompiles.append(found)
        if graphs >= _USUAL_RECOMPILES or found.advice.certain:
            usual = self._usual_guard(found.place) or found
            words, mend, _ = usual.advice
            self._teller.warn_once(
                f"compile-recompiles:{found.place}",
                f"compile: {shown(found.target)} ({found.place}) keeps recompiling. Guard that fails: {usual.guard}."
                f" {words} {mend}".rstrip(),
            )

    def _usual_guard(self, place: Place) -> Recompile | None:
        """Of the recompiles of one function, the last of the kind that came most often."""
        here = [found for found in reversed(self.recompiles) if found.place == place]
        kinds = Counter(found.advice.mend or found.guard for found in here)
        return max(here, key=lambda found: kinds[found.advice.mend or found.guard], default=None)

    def _add_failure(self, origin: Origin, metrics: Any) -> None:
        place, reason, mend = place_of(metrics, origin), str(metrics.fail_reason).partition("\n")[0], ""
        if "recompile limit" in reason.lower():
            reason = (
                f"torch gave up recompiling {place}: from now on, calls that fit none of its graphs run eagerly, in all"
                " targets that share them"
            )
            usual = self._usual_guard(place)
            mend = usual.advice.mend if usual else ""
        else:
            reason = f"torch cannot compile {place}: {reason}"
        self.add_fallback(origin.target, reason=reason, mend=mend)

    def _add_break(self, found: Break) -> None:
        if any((known.place, known.reason) == (found.place, found.reason) for known in self.breaks):
            return
        self.breaks.append(found)
        self._teller.warn_once(
            f"compile-break:{found.place}",
            f"compile: the graph of {shown(found.target)} breaks at {found.place}: {found.reason}",
        )

    def _add_backwards(self) -> None:
        """Backward graphs are compiled when the first backward runs, outside any call of a target."""
        if self._records is None:
            return
        for metrics in self._records.compiles_since(self._since_us):
            if metrics.is_forward is False and metrics.compile_id in self._compile_ids:
                self._backwards[metrics.compile_id, metrics.start_time_us] = metrics


def shown(target: str) -> str:
    """How a target is named in a sentence."""
    return repr(target) if target else "the whole module"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _few(targets: tuple[str, ...]) -> str:
    """All names, or the first and the last of many."""
    named = [shown(target) for target in targets]
    return ", ".join(named) if len(named) <= 4 else f"{named[0]} ... {named[-1]}"


def _end(reason: str, mend: str) -> str:
    """One or two sentences."""
    return f"{reason}. {mend}".rstrip()


def _times(count: int) -> str:
    return f"{count} times " if count > 1 else ""
