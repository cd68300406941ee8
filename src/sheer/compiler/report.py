"""What compiling did: graphs, breaks with their place, recompiles with their guard, seconds, and what runs eagerly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from sheer.observe import Teller

# A new batch size makes torch compile once for that size and once for all sizes; more than that is worth a word.
_USUAL_RECOMPILES = 3


class Break(NamedTuple):
    """A place where a target's graph ends and Python runs in between."""

    target: str
    place: str
    """`file:line in function`."""
    reason: str


class Recompile(NamedTuple):
    """One more graph for a function that had one."""

    target: str
    guard: str
    """What was assumed and no longer held, in torch's words."""


class Fallback(NamedTuple):
    """A target that runs, or ran, eagerly."""

    target: str
    reason: str


class Mark(NamedTuple):
    """How far dynamo's records reached when a call began."""

    frames: int
    breaks: int
    time_us: int


class Records:
    """Dynamo's own records, read only where something was compiled.

    Every frame that dynamo looks at moves one counter, so a call that compiles nothing costs one look at it. The
    records are read, never cleared or resized: they are torch's, and others may read them too.
    """

    def __init__(self) -> None:
        from torch._dynamo import utils  # late: importing dynamo takes a second

        self._utils = utils
        self._break_reasons = utils.graph_break_reasons

    def mark(self) -> Mark:
        """Where the records stand now."""
        frames: int = self._utils.counters["frames"]["total"]
        return Mark(frames, len(self._break_reasons), time.time_ns() // 1000)

    def moved(self, mark: Mark) -> bool:
        """Whether dynamo looked at any frame since `mark`."""
        moved: bool = self._utils.counters["frames"]["total"] != mark.frames
        return moved

    def breaks_since(self, mark: Mark) -> Sequence[Any]:
        """Graph breaks recorded since `mark`; a foreign `torch._dynamo.reset()` in between empties the list."""
        start = mark.breaks if mark.breaks <= len(self._break_reasons) else 0
        return self._break_reasons[start:]

    def compiles_since(self, time_us: int) -> list[Any]:
        """`CompilationMetrics` of the compiles begun since `time_us` (torch keeps the last 64)."""
        return [m for m in self._utils.get_compilation_metrics() if (m.start_time_us or 0) >= time_us]


class Report:
    """What compiling has done so far. A live object: ask it at any time; `print(report)` shows it as text."""

    def __init__(self, targets: tuple[str, ...], *, teller: Teller) -> None:
        self.targets = targets
        """FQNs of the compiled modules; `""` is the whole one."""
        self.active = False
        """Whether compiling is switched on."""
        self.graphs = 0
        """Forward graphs compiled so far, resumed pieces after a break included."""
        self.breaks: list[Break] = []
        self.recompiles: list[Recompile] = []
        self.fallbacks: list[Fallback] = []
        self._seconds = 0.0
        self._compile_ids: set[str] = set()
        self._backwards: dict[tuple[str, int], float] = {}
        self._since_us = time.time_ns() // 1000
        self._records: Records | None = None
        self._teller = teller

    @property
    def seconds(self) -> float:
        """Wall seconds spent compiling, graphs of the backward included."""
        self._add_backwards()
        return self._seconds + sum(self._backwards.values())

    def read(self, target: str, *, mark: Mark, records: Records) -> int:
        """Take in what dynamo recorded since `mark`, while `target` was called; gives the number of new graphs."""
        self._records = records
        compiles = [m for m in records.compiles_since(mark.time_us) if m.is_forward is not False]
        for metrics in compiles:
            self._seconds += metrics.entire_frame_compile_time_s or 0.0
            self._compile_ids.add(metrics.compile_id)
            if metrics.recompile_reason:
                self._add_recompile(target, metrics)
            if metrics.fail_type is not None:
                self._add_failure(target, metrics)
        for reason in records.breaks_since(mark):
            self._add_break(target, reason)
        graphs = sum(1 for m in compiles if m.has_guarded_code and m.graph_op_count)
        self.graphs += graphs
        return graphs

    def add_fallback(self, target: str, *, reason: str, mend: str = "") -> None:
        """Note that `target` runs eagerly, and say so the first time it happens for this reason."""
        fallback = Fallback(target, reason)
        if fallback not in self.fallbacks:
            self.fallbacks.append(fallback)
        self._teller.warn_once(f"compile-eager:{reason}", f"compile: {_shown(target)} runs eagerly: {reason}.{mend}")

    def fell_back(self, target: str) -> bool:
        """Whether any fallback of `target` is known."""
        return any(fallback.target == target for fallback in self.fallbacks)

    def __str__(self) -> str:
        lines = [
            f"compile: {'on' if self.active else 'off'}, {self.graphs} graphs in {self.seconds:.1f} s",
            f"  targets     {', '.join(map(_shown, self.targets))}",
        ]
        lines += [f"  break       {b.place} ({_shown(b.target)}): {b.reason}" for b in self.breaks]
        lines += [f"  recompile   {_shown(r.target)}: {r.guard}" for r in self.recompiles]
        lines += [f"  runs eagerly  {_shown(f.target)}: {f.reason}" for f in self.fallbacks]
        return "\n".join(lines)

    def _add_recompile(self, target: str, metrics: Any) -> None:
        # "3/1: guard # source line ..." : the id of the graph that did not fit, then the guard that failed.
        guard = metrics.recompile_reason.partition("\n")[0].partition(": ")[2].strip()
        guard = " ".join(guard.partition("(HINT:")[0].split())
        self.recompiles.append(Recompile(target, guard))
        if (metrics.cache_size or 0) >= _USUAL_RECOMPILES:
            self._teller.warn_once(
                f"compile-recompiles:{metrics.co_filename}:{metrics.co_firstlineno}",
                f"compile: {_shown(target)} ({_place(metrics)}) keeps recompiling. Last guard that failed: {guard}."
                " A number that forward changes on its module is a constant to the compiler: keep it in a tensor.",
            )

    def _add_failure(self, target: str, metrics: Any) -> None:
        reason = str(metrics.fail_reason).partition("\n")[0]
        if "recompile limit" in reason.lower():
            reason = f"torch gave up recompiling {_place(metrics)} and runs it eagerly from now on"
            self.add_fallback(target, reason=reason)
        else:
            self.add_fallback(target, reason=f"torch cannot compile {_place(metrics)}: {reason}")

    def _add_break(self, target: str, reason: Any) -> None:
        frame = reason.user_stack[-1] if reason.user_stack else None
        place = "unknown place" if frame is None else f"{frame.filename}:{frame.lineno} in {frame.name}"
        found = Break(target, place, reason.reason.partition("\n")[0].strip())
        if any((known.place, known.reason) == (found.place, found.reason) for known in self.breaks):
            return
        self.breaks.append(found)
        self._teller.warn_once(
            f"compile-break:{place}",
            f"compile: the graph of {_shown(target)} breaks at {place}: {found.reason}",
        )

    def _add_backwards(self) -> None:
        """Backward graphs are compiled when the first backward runs, outside any call of a target."""
        if self._records is None:
            return
        for metrics in self._records.compiles_since(self._since_us):
            if metrics.is_forward is False and metrics.compile_id in self._compile_ids:
                key = (metrics.compile_id, metrics.start_time_us)
                self._backwards[key] = metrics.entire_frame_compile_time_s or (metrics.duration_us or 0) / 1e6


def _shown(target: str) -> str:
    return repr(target) if target else "the whole module"


def _place(metrics: Any) -> str:
    return f"{metrics.co_filename}:{metrics.co_firstlineno} in {metrics.co_name}"
