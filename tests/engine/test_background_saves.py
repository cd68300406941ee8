"""Saves beside training: what is saved is what was there when it began, and training does not notice."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist  # noqa: TID251  # a store for threads that stand for ranks

import sheer
import sheer.testing
from sheer import checkpoint, comm
from sheer.checkpoint import background, saving
from sheer.errors import CheckpointError, CommError
from tests.engine.models import batches, odd
from tests.engine.oracle import Case, engine_run, start
from tests.engine.worlds import assert_same, contents, snapshot
from tests.harness import fresh

everywhere = pytest.mark.world_size(1, 2)


def case_of(stage: int, **extra: Any) -> Case:
    precision = {"bf16": {"enabled": True}} if stage == 2 else {}
    world, rank = sheer.testing.world_size(), sheer.testing.rank()
    return Case(stage=stage, world=world, rank=rank, extra={**precision, **extra})


def train(engine: Any, case: Case, steps: range) -> list[Any]:
    return [engine_run(engine, case, batches(1, size=case.global_batch, seed=step))[0] for step in steps]


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves beside training write nothing before the event is set."""
    go = threading.Event()

    def finish(*args: Any, **kwargs: Any) -> Path:
        assert go.wait(30)
        return saving.finish(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(background, "finish", finish)
        yield go
        go.set()


def until_over(engine: Any, case: Case, *, most: int = 2000) -> int:
    """Train until a step has found that the save is over; how many steps that took."""
    for step in range(most):
        if not engine._background.running:
            return step
        train(engine, case, range(1))
    raise AssertionError("the save does not end")


@everywhere
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_does_not_notice_and_the_moment_is_kept(stage: int, tmp_path: Path, monkeypatch) -> None:
    case = case_of(stage)
    undisturbed = start(odd(), case)
    expected = train(undisturbed, case, range(5))
    end = snapshot(undisturbed)
    undisturbed.destroy()
    engine = start(odd(), case)
    train(engine, case, range(2))
    engine.save_checkpoint(tmp_path, "plain", save_latest=False)
    with held(monkeypatch) as go:
        assert engine.save_checkpoint(tmp_path, "beside", blocking=False, client_state={"at": 2})
        assert train(engine, case, range(2, 5)) == expected[2:]
        assert_same(snapshot(engine), end)
        assert not (tmp_path / "latest").exists()
        go.set()
        engine.wait_for_checkpoint()
    assert_same(contents(tmp_path / "beside"), contents(tmp_path / "plain"))
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "beside"), {"at": 2})
    assert train(engine, case, range(2, 5)) == expected[2:]
    engine.destroy()


@contextmanager
def held_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The optimizer's state is not copied before the event is set."""
    go = threading.Event()
    copy = background.Background._copy_later

    def wait(self: background.Background) -> None:
        assert go.wait(30)
        copy(self)

    with monkeypatch.context() as patch:
        patch.setattr(background.Background, "_copy_later", wait)
        yield go
        go.set()


def set_state(engine: Any) -> None:
    for param in engine.module.parameters():
        if sheer.utils.safe_get_full_optimizer_state(param, "exp_avg") is not None:
            sheer.utils.safe_set_full_optimizer_state(param, torch.full_like(param, 7.0), "exp_avg")


@everywhere
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("changing", ["step", "set", "freeze", "offload", "load", "destroy"])
def test_who_changes_the_optimizer_waits_until_it_is_copied(
    stage: int, changing: str, tmp_path: Path, monkeypatch
) -> None:
    case = case_of(stage)
    engine = start(odd(), case)
    train(engine, case, range(2))
    engine.save_checkpoint(tmp_path, "plain")
    with held_copy(monkeypatch) as go:
        engine.save_checkpoint(tmp_path, "beside", blocking=False)
        assert engine._background._later
        threading.Timer(0.2, go.set).start()
        match changing:
            case "step":
                train(engine, case, range(2, 3))
            case "set":
                set_state(engine)
            case "freeze":
                next(engine.module.parameters()).requires_grad_(False)
                train(engine, case, range(2, 3))
            case "offload":
                engine.offload_states()
                engine.reload_states()
            case "load":
                engine.load_checkpoint(tmp_path, "plain")
            case "destroy":
                engine.destroy()
        assert go.is_set()
        assert not engine._background._later
        if changing != "destroy":
            engine.wait_for_checkpoint()
    assert_same(contents(tmp_path / "beside"), contents(tmp_path / "plain"))
    engine.destroy()


@everywhere
def test_state_that_is_written_to_by_hand_while_it_is_copied_is_not_saved(tmp_path: Path, monkeypatch) -> None:
    case = case_of(1)
    engine = start(odd(), case)
    train(engine, case, range(1))
    engine.save_checkpoint(tmp_path, "good")
    with held_copy(monkeypatch) as go:
        engine.save_checkpoint(tmp_path, "torn", blocking=False)
        for state in engine.optimizer.state.values():
            state["exp_avg"].mul_(2)
        go.set()
        with pytest.raises(CheckpointError, match=r"optim.exp_avg '.*' was written to while it was being copied"):
            engine.wait_for_checkpoint()
    assert checkpoint.list_tags(tmp_path) == ["good"]
    assert (tmp_path / "latest").read_text().strip() == "good"
    engine.save_checkpoint(tmp_path, "next", blocking=False)
    engine.wait_for_checkpoint()
    engine.destroy()


@everywhere
@pytest.mark.parametrize("stage", [1, 3])
def test_inference_mode_around_it_leaves_nothing_that_cannot_be_written_to(stage: int, tmp_path: Path) -> None:
    case = case_of(stage)
    engine = start(odd(), case)
    with torch.inference_mode():
        engine(batches(1, size=2)[0])
    train(engine, case, range(2))
    with torch.inference_mode():
        engine.save_checkpoint(tmp_path, "plain")
        engine.save_checkpoint(tmp_path, "beside", blocking=False)
        engine.offload_states()
        engine.reload_states()
    expected = train(engine, case, range(2, 4))
    with torch.inference_mode():
        engine.load_checkpoint(tmp_path, "beside")
    assert train(engine, case, range(2, 4)) == expected
    assert_same(contents(tmp_path / "beside"), contents(tmp_path / "plain"))
    engine.destroy()


@everywhere
def test_the_next_save_and_a_load_wait_and_the_copy_is_reused(tmp_path: Path, monkeypatch, caplog) -> None:
    case = case_of(1, checkpoint={"async_save": True})
    engine = start(odd(), case)
    train(engine, case, range(1))
    memory = []
    with caplog.at_level("INFO", "sheer"), held(monkeypatch) as go:
        for number in range(3):
            go.clear()
            threading.Timer(0.2, go.set).start()
            engine.save_checkpoint(tmp_path, f"{number}")
            memory.append(engine._background._snapshot._memory.data_ptr())
            if number == 1:
                assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "1")
                assert not engine._background.running
    assert len(set(memory)) == 1
    engine.save_checkpoint(tmp_path, "now", blocking=True)
    assert checkpoint.list_tags(tmp_path) == ["0", "1", "2", "now"]
    if case.rank == 0:
        assert "the save before this one is still being written; waiting for it" in caplog.text
    engine.wait_for_checkpoint()
    engine.destroy()


@everywhere
def test_a_step_finds_that_the_save_is_over(tmp_path: Path) -> None:
    case = case_of(2)
    engine = start(odd(), case)
    train(engine, case, range(1))
    engine.save_checkpoint(tmp_path, blocking=False)
    steps = engine.axis.gather_objects(until_over(engine, case))
    assert len(set(steps)) == 1, "on every rank in the same step"
    assert (tmp_path / "latest").read_text().strip() == "global_step1"
    engine.destroy()


@everywhere
@pytest.mark.parametrize("surfaces", ["step", "wait", "save", "destroy"])
def test_what_goes_wrong_surfaces_on_every_rank_and_harms_nothing(surfaces: str, tmp_path: Path, monkeypatch) -> None:
    case = case_of(1)
    engine = start(odd(), case)
    train(engine, case, range(1))
    engine.save_checkpoint(tmp_path, "good")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if case.rank == case.world - 1:
            patch.setattr(saving, "write_shards", full)
        engine.save_checkpoint(tmp_path, "bad", blocking=False)
        engine._background._thread.join()
    words = r"saving checkpoint 'bad'(.|\n)*No space left on device"
    steps = engine.global_steps
    with pytest.raises(CheckpointError, match=words):
        {
            "step": lambda: until_over(engine, case),
            "wait": engine.wait_for_checkpoint,
            "save": lambda: engine.save_checkpoint(tmp_path, "other"),
            "destroy": engine.destroy,
        }[surfaces]()
    engine.axis.barrier()
    assert checkpoint.list_tags(tmp_path) == ["good"]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".tmp")] == []
    if surfaces == "destroy":
        return
    assert len(set(engine.axis.gather_objects(engine.global_steps))) == 1
    assert engine.global_steps == steps + (surfaces == "step"), "the step that told of it was taken"
    train(engine, case, range(1))
    engine.save_checkpoint(tmp_path, "better", blocking=False)
    engine.destroy()
    assert (tmp_path / "latest").read_text().strip() == "better"


@everywhere
def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    case = case_of(1)
    engine = start(odd(), case)
    with pytest.raises(CheckpointError, match="JSON cannot hold"):
        engine.save_checkpoint(tmp_path, client_state={"x": object()}, blocking=False)
    (tmp_path / "mine").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="no checkpoint of Sheer"):
        engine.save_checkpoint(tmp_path, "mine", blocking=False)
    assert not engine._background.running
    engine.destroy()


@pytest.mark.world_size(2)
def test_threads_beside_talk_in_order_and_name_who_is_gone() -> None:
    axis = sheer.comm.data_axis()
    beside = axis.beside()
    assert [beside.gather_objects((axis.rank, n)) for n in range(3)] == [[(0, n), (1, n)] for n in range(3)]
    with pytest.raises(CommError, match=r"fail failed on 1 of 2 ranks:\n  rank 1: ValueError: one"):
        beside.agree(ValueError("one") if axis.rank else None, doing="fail")
    axis.barrier()
    left = beside._store
    assert not left.check(["1/told"])
    assert not left.check(["1/from/1"])
    if axis.rank == 0:
        lonely = axis.beside()
        lonely._timeout = 0.01
        with pytest.raises(CommError, match=r"rank 0 waited 0.* s in vain for rank 1 of 2"):
            lonely.gather_objects(None)
    axis.barrier()


def test_a_rank_that_is_gone_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    def begun(tag: str) -> saving.Begun:
        return saving.begin(tmp_path, tag, shards=[], facts={}, state={}, rng={}, axis=checkpoint.Alone())

    saving.finish(begun("good"), [], axis=checkpoint.Alone())
    lonely = comm.Beside(dist.HashStore(), rank=0, size=2, timeout=0.1)
    with pytest.raises(CheckpointError, match=r"rank 0 waited 0\.1 s in vain for rank 1 of 2"):
        saving.finish(begun("bad"), [], axis=lonely)
    assert sorted(os.listdir(tmp_path)) == [".lock", "good", "latest"]
    saving.finish(begun("better"), [], axis=checkpoint.Alone())


def test_who_takes_long_is_waited_for_and_who_is_gone_is_not() -> None:
    store = dist.HashStore()
    slow, waiting = (comm.Beside(store, rank=rank, size=2, timeout=60, silence=0.2) for rank in (1, 0))

    def late(rank: comm.Beside) -> None:
        time.sleep(1.0)
        rank.gather_objects("late")

    thread = threading.Thread(target=late, args=[slow])
    thread.start()
    assert waiting.gather_objects(None) == [None, "late"]
    thread.join()
    del slow, thread
    with pytest.raises(CommError, match=r"rank 1 of 2 has given no sign of life for 0\.2 s"):
        waiting.gather_objects(None)


def save_late(folder: Path, kill: bool) -> None:
    """A save that was done, and one beside whatever comes next; killed before it is whole."""
    engine = start(odd(), Case())
    engine_run(engine, Case(), batches(1, size=2))
    engine.save_checkpoint(folder, "good")
    engine_run(engine, Case(), batches(1, size=2))
    real = saving.write_bytes

    def dying(path: Path, data: bytes) -> Any:
        if kill and path.name == "index.json":
            os.kill(os.getpid(), signal.SIGKILL)
        return real(path, data)

    saving.write_bytes = dying
    engine.save_checkpoint(folder, "late", blocking=False)


def assert_loads(folder: Path, tag: str) -> None:
    assert (folder / "latest").read_text().strip() == tag
    assert torch.isfinite(checkpoint.load_full(folder)["embed.weight"]).all()


def test_the_end_of_the_interpreter_waits(tmp_path: Path) -> None:
    script = "import pathlib, sys; from tests.engine.test_background_saves import save_late as s"
    command = [sys.executable, "-c", f"{script}; s(pathlib.Path(sys.argv[1]), kill=False)", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert_loads(tmp_path, "late")


def test_a_kill_leaves_the_last_good_one(tmp_path: Path) -> None:
    process = fresh.started(save_late, tmp_path, True)
    process.join(110)
    assert process.exitcode == -signal.SIGKILL
    assert_loads(tmp_path, "good")
