"""What is known of compiling: plain data, and the reader of dynamo's own records."""

from __future__ import annotations

import re
import time
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from sheer.compiler.advice import Advice, explain


class Place(NamedTuple):
    """A line of somebody's code."""

    file: str
    line: int
    function: str
    code: str = ""
    """The line itself, as torch saw it."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Graph(NamedTuple):
    """One forward graph that was compiled. Targets that are alike share it."""

    target: str
    """The target whose call made it."""
    place: Place
    mode: str
    """`"training"` (gradients on) or `"inference"`."""
    operations: int
    seconds: float
    cache_hits: int
    """How many times generated code was found in inductor's cache, the backward's included where both come at once."""
    cache_misses: int
    resumed: bool
    """Whether it goes on after a break, instead of from the beginning of forward."""


class Break(NamedTuple):
    """A place where a target's graph ends and Python runs in between."""

    target: str
    place: Place
    reason: str
    hints: tuple[str, ...]
    """What torch proposes."""


class Recompile(NamedTuple):
    """One more graph for a function that had one."""

    target: str
    guard: str
    """What was assumed and no longer held, in torch's words."""
    place: Place
    """The function that was compiled once more."""

    @property
    def advice(self) -> Advice:
        """The guard in plain words, and what to change; empty where it is not known."""
        return explain(self.guard)


class Fallback(NamedTuple):
    """A target that runs, or ran, eagerly."""

    target: str
    reason: str
    mend: str = ""


class Group(NamedTuple):
    """Targets that are alike and share their graphs."""

    kind: str
    """Their class."""
    place: Place | None
    """Where their forward begins; None where it is no Python function."""
    targets: tuple[str, ...]


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


class Origin(NamedTuple):
    """Whose call something was compiled in."""

    target: str
    place: Place
    """Its forward."""
    training: bool


def graph_of(origin: Origin, metrics: Any) -> Graph:
    """The graph that one `CompilationMetrics` is about."""
    return Graph(
        target=origin.target,
        place=place_of(metrics, origin),
        mode="training" if origin.training else "inference",
        operations=metrics.graph_op_count or 0,
        seconds=metrics.entire_frame_compile_time_s or 0.0,
        cache_hits=metrics.inductor_fx_local_cache_hit_count or 0,
        cache_misses=metrics.inductor_fx_local_cache_miss_count or 0,
        resumed=(metrics.co_name or "").startswith("torch_dynamo_resume_in_"),
    )


def recompile_of(origin: Origin, metrics: Any) -> Recompile:
    """Why one `CompilationMetrics` was needed."""
    # "3/1: guard # source line ..." : the id of the graph that did not fit, then the guard that failed.
    guard = metrics.recompile_reason.partition("\n")[0].partition(": ")[2].partition("(HINT:")[0]
    return Recompile(origin.target, " ".join(guard.split()), place_of(metrics, origin))


def place_of(metrics: Any, origin: Origin) -> Place:
    """Where the compiled function begins; dynamo does not say where it gave up before it began."""
    if metrics.co_filename is None:
        return origin.place
    return Place(metrics.co_filename, metrics.co_firstlineno, _plain_name(metrics.co_name))


def place_of_code(code: types.CodeType, *, name: str | None = None) -> Place:
    """Where a function begins."""
    return Place(code.co_filename, code.co_firstlineno, name or code.co_name)


def break_of(target: str, reason: Any) -> Break:
    """A `GraphCompileReason` of dynamo's, without its addresses of web pages and internal context."""
    frame = reason.user_stack[-1] if reason.user_stack else None
    place = (
        Place("unknown file", 0, "?")
        if frame is None
        else Place(frame.filename, frame.lineno or 0, _plain_name(frame.name), (frame.line or "").strip())
    )
    lines = [line.strip() for line in reason.reason.splitlines()]
    hints = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")]
    if lines[0].startswith("generic_jump"):  # torch's word for it, without any explanation
        return Break(
            target,
            place,
            "a Python `if`, `while` or `assert` depends on the value of a tensor",
            ("Use torch.where, torch.cond, or a condition on something that is no tensor.",),
        )
    return Break(target, place, lines[0], tuple(hint for hint in hints if "report an issue" not in hint))


def _plain_name(function: str) -> str:
    """Dynamo names what goes on after a break `torch_dynamo_resume_in_forward_at_8`."""
    return re.sub(r"^(?:torch_dynamo_resume_in_)+(.+?)(?:_at_\d+)+$", r"\1", function)
