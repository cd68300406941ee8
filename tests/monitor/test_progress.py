"""What people see of a run: numbers, pace and time left, on a terminal and elsewhere."""

from __future__ import annotations

import io
import subprocess
import sys

from sheer.monitor import Progress


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_at_intervals_and_the_last_step_in_any_case():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(10, stream=stream, interval=5.0, clock=clock)
    for step in range(1, 10):
        progress.write(step, {"loss": 1 / step})
        clock.now += 2.0
    progress.close()
    progress.close()
    shown = [line.split("  ")[0] for line in stream.getvalue().splitlines()]
    assert shown == ["step 1/10", "step 4/10", "step 7/10", "step 9/10"]


def test_a_line_has_every_number_and_the_time_left():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(100, tokens_per_step=2048, stream=stream, interval=0.0, clock=clock)
    for step in (39, 40):
        progress.write(step, {"loss": 2.34567, "grad_norm": 0.5, "lr": 3e-4, "other": 1.0})
        clock.now += 0.25
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 39/100  loss 2.3457  grad norm 0.500  lr 3.00e-04"
    assert lines[1] == "step 40/100  loss 2.3457  8.19k tokens/s  grad norm 0.500  ETA 0:15  lr 3.00e-04"


def test_numbers_that_are_not_known_are_left_out():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(None, stream=stream, interval=0.0, clock=clock)
    progress.write(1, {})
    clock.now += 1.0
    progress.write(2, {"loss": float("nan")})
    assert stream.getvalue().splitlines() == ["step 1", "step 2  loss nan"]


def test_the_pace_forgets_a_slow_start():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(10_000, tokens_per_step=1, stream=stream, interval=0.0, clock=clock)
    progress.write(1, {})
    clock.now += 3600.0
    for step in range(2, 101):
        progress.write(step, {})
        clock.now += 0.5
    assert stream.getvalue().splitlines()[-1] == "step 100/10000  2 tokens/s  ETA 1:22:30"


def test_large_paces_are_short():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(None, tokens_per_step=999_960, stream=stream, interval=0.0, clock=clock)
    for step in (1, 2):
        progress.write(step, {})
        clock.now += 1.0
    assert stream.getvalue().splitlines()[-1] == "step 2  1M tokens/s"


def test_on_a_terminal_a_bar_is_drawn_and_left_standing():
    clock, stream = Clock(), Terminal()
    progress = Progress(1000, tokens_per_step=12_340, stream=stream, clock=clock)
    for step in (1, 2):
        progress.write(step, {"loss": 1.5, "grad_norm": 0.25, "lr": 0.1})
        clock.now += 1.0
    progress.close()
    progress.close()
    last = stream.getvalue().split("\r")[-1]
    for part in ("2/1000", "loss 1.5000", "12.3k tokens/s", "grad norm 0.250", "ETA 16:38"):
        assert part in last


def test_importing_the_room_does_not_import_rich():
    code = "import sys, sheer.monitor; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
