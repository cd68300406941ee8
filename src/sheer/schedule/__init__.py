"""What happens when: a step as plain data, one list of actions per pipeline stage. Pure: no tensors, no processes."""

from sheer.schedule.checks import faults, problems, validate
from sheer.schedule.generators import (
    GENERATORS,
    accumulate,
    by_name,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)
from sheer.schedule.plan import Action, Carried, Kind, Schedule, Transfer, in_flight, receives, sends, shorten
from sheer.schedule.simulation import Cost, Span, Timeline, equal_cost, simulate
from sheer.schedule.written import custom, parse, to_json, to_text

__all__ = [
    "GENERATORS",
    "Action",
    "Carried",
    "Cost",
    "Kind",
    "Schedule",
    "Span",
    "Timeline",
    "Transfer",
    "accumulate",
    "by_name",
    "custom",
    "equal_cost",
    "faults",
    "forward_only",
    "gpipe",
    "in_flight",
    "interleaved",
    "one_f_one_b",
    "parse",
    "problems",
    "receives",
    "sends",
    "shorten",
    "simulate",
    "to_json",
    "to_text",
    "validate",
    "zero_bubble",
    "zero_bubble_v",
]
