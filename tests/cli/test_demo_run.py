"""The demo as a user runs it: as a process, to its end, and through every way of interrupting it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from examples.gpt import GPT, GPTConfig

from sheer.checkpoint import load_full
from sheer.cli.demo.folder import Folder, read_curve

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc"),
    pytest.mark.timeout(400),  # every run starts three processes, and a busy machine takes its time for each
]

PATIENCE = 200
STEPS = 240
SMALL = f"--steps {STEPS} --width 32 --heads 2 --layers 2 --context 32 --save-every 20".split()


class Ended(NamedTuple):
    code: int
    said: str


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    how = () if "--backend" in more else ("--no-compile",)
    program = "import sys; from sheer.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", program, "demo", "--out", str(out), *SMALL, *how, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> Ended:
    said, _ = process.communicate(timeout=PATIENCE)
    return Ended(process.returncode, said)


def demo(out: Path, *more: str) -> Ended:
    return end(start(out, *more))


def processes_of(out: Path) -> list[int]:
    """Every process that carries the run's folder in its command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(out).encode() in words:
                found.append(int(entry.name))
    return found


def wait_until_gone(out: Path) -> None:
    deadline = time.monotonic() + 10
    while left := processes_of(out):
        assert time.monotonic() < deadline, f"processes left behind: {left}"
        time.sleep(0.05)


def wait_for_step(out: Path, process: subprocess.Popen[str], step: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(read_curve(Folder(out).curve)) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.01)


def saved(out: Path) -> int:
    """The step of the last checkpoint, as the disk has it."""
    return int(re.sub(r"\D", "", (Folder(out).checkpoints / "latest").read_text()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run nobody interrupted."""
    out = tmp_path_factory.mktemp("finished") / "run"
    ended = demo(out)
    assert ended.code == 0, ended.said
    return out


def test_a_run_learns_and_leaves_its_files(finished: Path) -> None:
    folder = Folder(finished)
    curve = read_curve(folder.curve)
    assert [point.step for point in curve] == list(range(1, STEPS + 1))
    assert curve[0].loss > 5.0
    assert sum(point.loss for point in curve[-10:]) / 10 < curve[0].loss - 1.0
    assert folder.picture.read_bytes().startswith(b"\x89PNG")
    assert folder.sample.read_text().startswith("def ")
    assert processes_of(finished) == []


def test_a_finished_run_is_not_trained_again(finished: Path) -> None:
    folder = Folder(finished)
    curve, sample = folder.curve.read_bytes(), folder.sample.read_bytes()
    folder.sample.unlink()
    folder.picture.unlink()
    ended = demo(finished)
    assert ended.code == 0
    assert "is finished" in ended.said
    assert folder.curve.read_bytes() == curve
    assert folder.sample.read_bytes() == sample
    assert folder.picture.exists()


def test_other_knobs_than_the_runs_are_refused(finished: Path) -> None:
    curve = Folder(finished).curve.read_bytes()
    ended = demo(finished, "--lr", "0.001", "--width", "64")
    assert ended.code == 2
    assert "--lr was 0.003, now 0.001" in ended.said
    assert "--width was 32, now 64" in ended.said
    assert "--fresh" in ended.said
    assert Folder(finished).curve.read_bytes() == curve


def test_interrupted_it_ends_where_an_uninterrupted_run_does(tmp_path: Path, finished: Path) -> None:
    out = tmp_path / "run"

    process = start(out)
    wait_for_step(out, process, 45)
    worker = max(set(processes_of(out)) - {process.pid})
    os.kill(worker, signal.SIGKILL)
    ended = end(process)
    assert ended.code == 1, ended.said
    assert "was ended by SIGKILL" in ended.said
    stands = saved(out)
    assert stands in range(40, STEPS, 20)  # 40, where the machine let the signal arrive at once
    assert f"The last checkpoint is of step {stands} of {STEPS}" in ended.said
    wait_until_gone(out)

    for number, step in ((signal.SIGINT, 65), (signal.SIGTERM, 85)):
        process = start(out)
        wait_for_step(out, process, step)
        process.send_signal(number)
        ended = end(process)
        assert ended.code == 128 + number, ended.said
        assert f"going on from the checkpoint of step {stands}" in ended.said
        stands = len(read_curve(Folder(out).curve))
        assert step <= stands < STEPS
        assert f"Stopped by {number.name}" in ended.said
        assert f"The last checkpoint is of step {stands} of {STEPS}" in ended.said
        assert processes_of(out) == []

    ended = demo(out)
    assert ended.code == 0, ended.said
    assert f"going on from the checkpoint of step {stands}" in ended.said
    assert_same_run(out, finished)


def assert_same_run(left: Path, right: Path) -> None:
    assert Folder(left).curve.read_bytes() == Folder(right).curve.read_bytes()
    ours, theirs = load_full(Folder(left).checkpoints), load_full(Folder(right).checkpoints)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert Folder(left).sample.read_bytes() == Folder(right).sample.read_bytes()


def test_compiled_it_is_resumed_exactly_and_loads_without_an_engine(tmp_path: Path) -> None:
    """With a backend that needs no C++ compiler; what is killed is the launcher, which can then do nothing any more."""
    compiled = ("--backend", "aot_eager", "--steps", "90", "--save-every", "10", "--processes", "1")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ended = demo(whole, *compiled)
    assert ended.code == 0, ended.said
    assert str(Folder(whole).picture) in ended.said
    assert str(Folder(whole).checkpoints) in ended.said
    assert str(Folder(whole).sample) in ended.said
    process = start(cut, *compiled)
    wait_for_step(cut, process, 12)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    wait_until_gone(cut)
    stands = saved(cut)
    again = demo(cut, *compiled)
    assert again.code == 0, again.said
    assert f"going on from the checkpoint of step {stands}" in again.said
    assert_same_run(cut, whole)
    model = GPT(GPTConfig(context=32, width=32, layers=2, heads=2))
    model.load_state_dict(load_full(Folder(whole).checkpoints))
