"""From the outcomes of all ranks to the reports of one test."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, NamedTuple, cast

import pytest

from sheer.testing.wire import End, Outcome

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")


class Verdict(Enum):
    """What one rank says about the test."""

    PASSED = "passed"
    SKIPPED = "skipped"
    XFAILED = "failed as expected"
    XPASSED = "passed though expected to fail"
    FAILED = "failed"
    STRANDED = "cut off"


class RankReport(NamedTuple):
    """One rank's outcome, judged."""

    outcome: Outcome
    verdict: Verdict
    phase: Phase
    """Where it failed or was skipped; `call` for the rest."""
    reports: list[pytest.TestReport]


class Story:
    """What every rank has to tell, as pytest's `longrepr` of a failed test."""

    def __init__(self, ranks: list[RankReport], *, size: int, headline: str) -> None:
        self._ranks, self._size, self._headline = ranks, size, headline

    @property
    def reprcrash(self) -> Crash:
        """What pytest shows of this test in its short summary."""
        return Crash(self._headline)

    def toterminal(self, tw: Any) -> None:
        """Write it: failed ranks in the order in which they ended, each with its traceback or stacks."""
        for rank in self._ranks:
            if rank.verdict in (Verdict.FAILED, Verdict.STRANDED, Verdict.XPASSED):
                tw.sep("- ", _title(rank, size=self._size), bold=True)
                _tell(rank, tw)
        rest = [r for r in self._ranks if r.verdict not in (Verdict.FAILED, Verdict.STRANDED, Verdict.XPASSED)]
        for rank in rest:
            tw.line(f"rank {rank.outcome.rank} of {self._size} {rank.verdict.value}{_reason(rank)}")
        if not any(rank.verdict is Verdict.FAILED for rank in self._ranks):
            tw.line(self._headline, red=True)

    def __str__(self) -> str:
        from io import StringIO

        from _pytest._io import TerminalWriter

        text = StringIO()
        self.toterminal(TerminalWriter(text))
        return text.getvalue().strip()


class Crash(NamedTuple):
    """The one line of a failure."""

    message: str

    def __str__(self) -> str:
        return self.message


def merge(item: pytest.Item, *, size: int, outcomes: list[Outcome], seconds: float) -> list[pytest.TestReport]:
    """The setup, call and teardown reports of the whole test. One of them tells the story of all ranks."""
    ranks = [_judge(outcome, item) for outcome in outcomes]
    verdict, phase = _overall(ranks)
    reports = []
    for each in PHASES:
        if each == "call" and phase == "setup":
            continue  # as in any pytest: a test whose setup did not pass is not called
        report = _passed(item, each, seconds=seconds if each == "call" else 0.0)
        report.user_properties = next((r.user_properties for rank in ranks for r in rank.reports if r.when == each), [])
        if each == phase:
            _express(report, verdict, ranks, size=size)
        reports.append(report)
    return reports


def _judge(outcome: Outcome, item: pytest.Item) -> RankReport:
    if outcome.end is End.STRANDED:
        return RankReport(outcome, Verdict.STRANDED, "call", [])
    if outcome.finished is None:
        return RankReport(outcome, Verdict.FAILED, "call", [])
    restore = item.config.hook.pytest_report_from_serializable
    reports = [restore(config=item.config, data=data) for data in outcome.finished.reports]
    if outcome.finished.trouble is not None:
        return RankReport(outcome, Verdict.FAILED, "call" if reports else "setup", reports)
    worst = next((r for r in reports if r.failed), None) or next((r for r in reports if r.skipped), None)
    if worst is not None:
        return RankReport(outcome, _verdict(worst), worst.when, reports)
    unexpected = any(hasattr(r, "wasxfail") for r in reports)
    return RankReport(outcome, Verdict.XPASSED if unexpected else Verdict.PASSED, "call", reports)


def _verdict(report: pytest.TestReport) -> Verdict:
    if report.skipped:
        return Verdict.XFAILED if hasattr(report, "wasxfail") else Verdict.SKIPPED
    strict = isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]")
    return Verdict.XPASSED if strict else Verdict.FAILED


def _overall(ranks: list[RankReport]) -> tuple[Verdict, Phase]:
    """The test's verdict, and the phase whose report tells it: the earliest in which a rank stands for that verdict."""
    verdicts = {rank.verdict for rank in ranks}
    if Verdict.FAILED in verdicts:
        verdict = Verdict.FAILED
    elif Verdict.XFAILED in verdicts:
        verdict = Verdict.XFAILED
    elif len(verdicts) == 1:
        verdict = verdicts.pop()
    else:
        return Verdict.FAILED, "call"  # the ranks disagree, as where only some of them skip
    phases = [rank.phase for rank in ranks if rank.verdict is verdict]
    return verdict, min(phases, key=PHASES.index)


def _express(report: pytest.TestReport, verdict: Verdict, ranks: list[RankReport], *, size: int) -> None:
    """Give the report the verdict, the words and the output of all ranks."""
    spokesman = next((rank for rank in ranks if rank.verdict is verdict), None)
    own = next((r for r in spokesman.reports if r.when == report.when), None) if spokesman else None
    report.sections = [section for rank in ranks for section in _sections(rank)]
    if verdict is Verdict.FAILED:
        report.outcome = "failed"
        report.longrepr = cast(Any, Story(ranks, size=size, headline=_headline(ranks)))
    elif own is not None:
        report.outcome, report.longrepr = own.outcome, own.longrepr
        if hasattr(own, "wasxfail"):
            report.wasxfail = own.wasxfail


def _passed(item: pytest.Item, when: Phase, *, seconds: float) -> pytest.TestReport:
    keywords: dict[str, Literal[1]] = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, "passed", None, when, duration=seconds)


def _sections(rank: RankReport) -> list[tuple[str, str]]:
    """Output is per process, not per phase; log records come with the reports."""
    number = rank.outcome.rank
    found = [(f"{name} of rank {number}", text) for report in rank.reports[-1:] for name, text in report.sections]
    printed = [("stdout", rank.outcome.stdout), ("stderr", rank.outcome.stderr)]
    return found + [(f"Captured {name} of rank {number}", text) for name, text in printed if text]


def _headline(ranks: list[RankReport]) -> str:
    first = next((rank for rank in ranks if rank.verdict is Verdict.FAILED), None)
    if first is None:
        by_verdict = {v: [r.outcome.rank for r in ranks if r.verdict is v] for v in Verdict}
        told = [f"{verdict.value} on rank {', '.join(map(str, who))}" for verdict, who in by_verdict.items() if who]
        return f"the ranks disagree: {'; '.join(told)}"
    crash = next((getattr(r.longrepr, "reprcrash", None) for r in first.reports if r.failed), None)
    words = str(crash.message) if crash else _what_happened(first)
    return f"rank {first.outcome.rank}: {words.partition(chr(10))[0]}"


def _title(rank: RankReport, *, size: int) -> str:
    who = f"rank {rank.outcome.rank} of {size}"
    if rank.outcome.end is not End.FINISHED:
        return f"{who}: {rank.outcome.end.value}"
    return f"{who} {rank.verdict.value} in {rank.phase}"


def _what_happened(rank: RankReport) -> str:
    if rank.outcome.end is End.DIED:
        return rank.outcome.account
    finished = rank.outcome.finished
    words: str = rank.outcome.end.value if finished is None else finished.trouble or rank.verdict.value
    return words.strip().splitlines()[-1]


def _tell(rank: RankReport, tw: Any) -> None:
    if rank.outcome.finished is None:
        tw.line(rank.outcome.account or "It gave no stacks when asked for them.")
        return
    if rank.outcome.finished.trouble is not None:
        tw.line(rank.outcome.finished.trouble)
    for report in rank.reports:
        if report.failed:
            report.toterminal(tw)


def _reason(rank: RankReport) -> str:
    """Why a rank skipped, which pytest keeps as (file, line, reason)."""
    skipped = next((r.longrepr for r in rank.reports if r.skipped), None)
    return f": {skipped[2]}" if isinstance(skipped, tuple) else ""
