"""What happens when: a step as plain data, one list of actions per pipeline stage. Pure: no tensors, no processes."""

from sheer.schedule.checks import faults, problems, validate
from sheer.schedule.generators import accumulate, forward_only, gpipe, one_f_one_b
from sheer.schedule.plan import Action, Carried, Kind, Schedule, Transfer, in_flight, receives, sends
from sheer.schedule.simulation import Cost, Span, Timeline, equal_cost, simulate

__all__ = [
    "Action",
    "Carried",
    "Cost",
    "Kind",
    "Schedule",
    "Span",
    "Timeline",
    "Transfer",
    "accumulate",
    "equal_cost",
    "faults",
    "forward_only",
    "gpipe",
    "in_flight",
    "one_f_one_b",
    "problems",
    "receives",
    "sends",
    "simulate",
    "validate",
]
