"""The order of gathers, agreed over ranks: each is a collective, and ranks may run different parts of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher


class Walk:
    """One pass over the plan, a sequence of units that contains every rank's own as a subsequence."""

    def __init__(self, order: Sequence[str]) -> None:
        self.order = tuple(order)
        last = {unit: position for position, unit in enumerate(self.order)}
        # An outer block has its own backward around those of the blocks inside it.
        self._last = {
            unit: max(position for other, position in last.items() if other == unit or other.startswith(f"{unit}."))
            for unit in last
        }
        self.at = 0
        """Position of what comes next."""
        self.record: list[str] = []
        """What this rank has come to in this pass."""

    def restart(self) -> None:
        """A new pass begins."""
        self.at, self.record = 0, []

    def reach(self, unit: str) -> range | None:
        """This rank comes to `unit`. The positions that it skips, which other ranks may not; None where the plan does
        not have the unit any more, so that every rank must make this call."""
        self.record.append(unit)
        try:
            found = self.order.index(unit, self.at)
        except ValueError:
            return None
        passed = range(self.at, found)
        self.at = found + 1
        return passed

    def is_over(self, unit: str, position: int) -> bool:
        """Whether `unit` is in the plan, and neither it nor a unit inside it from `position` on."""
        return self._last.get(unit, position) < position

    def rest(self) -> range:
        """This rank is through; the positions that it skips."""
        left = range(self.at, len(self.order))
        self.at = len(self.order)
        return left

    @property
    def next(self) -> str | None:
        """What comes next; None at the end."""
        return self.order[self.at] if self.at < len(self.order) else None


def merge(records: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """A sequence that contains each of `records` as a subsequence; their own where all are equal."""
    merged: list[str] = []
    for record in records:
        grown: list[str] = []
        for tag, i, j, k, n in SequenceMatcher(None, merged, record, autojunk=False).get_opcodes():
            grown += merged[i:j]
            if tag != "equal":
                grown += record[k:n]
        merged = grown
    return tuple(merged)


def complete(order: Sequence[str], everything: Sequence[str]) -> tuple[str, ...]:
    """`order` with what it lacks of `everything`, each after the one that comes before it there."""
    result = list(order)
    for position, unit in enumerate(everything):
        if unit not in result:
            before = next((other for other in reversed(everything[:position]) if other in result), None)
            at = 0 if before is None else len(result) - result[::-1].index(before)
            result.insert(at, unit)
    return tuple(result)
