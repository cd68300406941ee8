from __future__ import annotations

import os
import signal
import sys

from tests.harness import fresh


def what_is_there(number: int) -> tuple[int, int, bool]:
    return number, os.getpid(), "torch._dynamo" in sys.modules


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_each_is_a_process_of_its_own_that_has_imported_torch() -> None:
    (code, first), (_, second) = (fresh.result_of(what_is_there, number) for number in (1, 2))
    assert (code, first[0], first[2]) == (0, 1, True)
    assert len({first[1], second[1], os.getpid()}) == 3


def test_how_it_ended_is_told() -> None:
    assert fresh.result_of(be_killed) == (-signal.SIGKILL, None)
    assert fresh.result_of(sys.exit, 3) == (3, None)
