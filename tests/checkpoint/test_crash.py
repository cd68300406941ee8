"""A save that is killed, or refused by the disk, at any call: the last good checkpoint loads, nothing is left."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sheer.checkpoint import Axis, Shard, folder, list_tags, load_full, open_checkpoint, save, saving
from sheer.errors import CheckpointError
from tests.checkpoint import faults
from tests.checkpoint.ranks import Solo, cut, errors_on_ranks, whole
from tests.harness import fresh


@pytest.mark.parametrize("scenario", faults.SCENARIOS)
def test_killed_at_any_call_the_last_good_checkpoint_loads(tmp_path: Path, scenario: str) -> None:
    ended, outcomes = fresh.result_of(faults.killed_everywhere, tmp_path / "root", scenario)
    assert ended == 0
    assert len(outcomes) > 20, "a save makes at least that many calls"
    good = {"nothing", "new"} if scenario == "first save" else {"old", "new"}
    assert {outcome["found"] for outcome in outcomes} == good
    assert {outcome["after"] for outcome in outcomes} == {"new"}
    assert not any(outcome["left"] for outcome in outcomes), "the next save leaves nothing of the killed one"
    for outcome in outcomes:
        assert "after" in outcome["tags"]
        assert scenario != "same tag" or "step1" in outcome["tags"], "the replaced tag is there, old or new"


def save_shard_of_rank(root: Path, tag: str, shards: Sequence[Shard], axis: Axis) -> None:
    save(root, tag, shards=[shards[axis.rank]], facts={}, state={}, rng={}, axis=axis)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("scenario", ["new tag", "same tag"])
def test_refused_at_any_call_every_rank_gets_an_error_and_nothing_is_lost(
    tmp_path: Path, scenario: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no power will fail; it takes most of the time
    shards = cut("param", "w", faults.value(2), cuts=[300])
    tag = "step1" if scenario == "same tag" else "step9"
    refused = 0
    for at in range(10_000):
        root = tmp_path / str(at)
        faults.before(root, scenario)

        def strike(name: str, half: Callable[[], Any]) -> Any:
            raise OSError(number, os.strerror(number), "a path")

        with faults.tripwire(at, strike) as wire:
            errors = errors_on_ranks(2, partial(save_shard_of_rank, root, tag, shards))
        if not wire.struck:
            break
        failed = any(error is not None for error in errors)
        if failed:
            refused += 1
            assert all(isinstance(error, CheckpointError) for error in errors), errors
            assert os.strerror(number) in str(errors[0])
        assert faults.loads(root) in ({"old", "new"} if failed else {"new"})
        faults.save_value(root, "after", 2)
        assert faults.loads(root) == "new"
        assert not [name for name in os.listdir(root) if name.startswith((".tmp-", ".old-"))]
    assert refused > 20


def test_a_failed_save_leaves_no_directory_behind(tmp_path: Path) -> None:
    faults.before(tmp_path, "new tag")
    with mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, "no space")), pytest.raises(CheckpointError):
        faults.save_value(tmp_path, "t", 2)
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step1"]


def test_a_disk_that_takes_no_more_loses_nothing(tmp_path: Path) -> None:
    """Not a call that is made to fail: the system itself writes a part and refuses the rest."""
    faults.before(tmp_path, "new tag")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            faults.save_value(tmp_path, "t", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert faults.loads(tmp_path) == "old"
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step1"]


def test_all_wait_for_a_slow_rank(tmp_path: Path) -> None:
    shards = cut("param", "w", faults.value(2), cuts=[300])
    real, slow = saving.write_shards, threading.Event()

    def write(path: Path, held: Sequence[Shard], **options: Any) -> Any:
        if path.name == "rank00001.safetensors":
            slow.wait(0.3)
            assert not (tmp_path / "t").exists()
        return real(path, held, **options)

    with mock.patch.object(saving, "write_shards", write):
        assert errors_on_ranks(2, partial(save_shard_of_rank, tmp_path, "t", shards)) == [None, None]
    assert torch.equal(load_full(tmp_path)["w"], faults.value(2))


def test_a_process_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    """As a loader's worker is, during a save beside training."""
    staging = folder.Staging(tmp_path, "t", nbytes=1)
    inherited = os.dup(staging._lock)  # what a fork has: the same open file
    staging.close()
    faults.save_value(tmp_path, "t", 2)
    os.close(inherited)


def test_everything_is_flushed_before_it_becomes_visible(tmp_path: Path) -> None:
    trace: list[tuple[str, str]] = []
    names: dict[int, str] = {}
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(fd: int) -> None:
        names[fd] = os.readlink(f"/proc/self/fd/{fd}")
        trace.append(("fsync", os.path.basename(names[fd])))
        real["fsync"](fd)

    def moved(name: str) -> Callable[[Any, Any], None]:
        def move(source: Any, target: Any) -> None:
            trace.append((name, os.path.basename(target)))
            real[name](source, target)

        return move

    root = tmp_path / "root"
    with (
        mock.patch.object(os, "fsync", fsync),
        mock.patch.object(os, "rename", moved("rename")),
        mock.patch.object(os, "replace", moved("replace")),
    ):
        faults.save_value(root, "t", 1)
    visible, latest = trace.index(("rename", "t")), trace.index(("replace", "latest"))
    flushed = {name for _, name in trace[:visible]}
    assert {"rank00000.safetensors", "state.json", "rng.safetensors", "index.json"} <= flushed
    assert trace[visible - 1][1].startswith(".tmp-t-"), "the directory itself, last"
    assert ("fsync", "root") in trace[visible:latest], "the rename is on the disk before latest moves"
    assert trace[latest + 1 :] == [("fsync", "root")]


def test_too_little_space_is_found_before_the_first_byte(tmp_path: Path) -> None:
    faults.before(tmp_path, "new tag")
    usage = mock.Mock(free=5000)
    with (
        mock.patch("shutil.disk_usage", return_value=usage),
        pytest.raises(CheckpointError, match=r"free; this checkpoint needs .* Nothing was written"),
    ):
        faults.save_value(tmp_path, "t", 2)
    assert list_tags(tmp_path) == ["step1"]


def test_a_second_save_to_the_same_directory_is_refused_while_one_is_in_progress(tmp_path: Path) -> None:
    faults.before(tmp_path, "new tag")
    with (tmp_path / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=rf"another save .* in progress \(process {os.getpid()} on "):
            faults.save_value(tmp_path, "t", 2)
    faults.save_value(tmp_path, "t", 2)
    assert list_tags(tmp_path) == ["step1", "t"]


def test_a_directory_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "precious.pt").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="no checkpoint of Sheer"):
        faults.save_value(tmp_path, "t", 2)
    assert (tmp_path / "t" / "precious.pt").read_bytes() == b"mine"


def test_root_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("x")
    with pytest.raises(CheckpointError, match="cannot save to"):
        faults.save_value(tmp_path / "root", "t", 2)


def test_keep_last_removes_the_oldest_after_the_commit_but_never_latest(tmp_path: Path) -> None:
    for step in range(3):
        faults.save_value(tmp_path, f"step{step}", step)
    save(tmp_path, "step3", shards=[], facts={}, state={}, rng={}, axis=Solo(), save_latest=False, keep_last=1)
    assert list_tags(tmp_path) == ["step2", "step3"]
    assert open_checkpoint(tmp_path).tag == "step2"
    faults.save_value(tmp_path, "step4", 4, keep_last=2)
    assert list_tags(tmp_path) == ["step3", "step4"]


def test_a_checkpoint_put_aside_by_a_killed_save_is_found(tmp_path: Path) -> None:
    faults.before(tmp_path, "new tag")
    (tmp_path / "step1").rename(tmp_path / ".old-step1")
    assert list_tags(tmp_path) == ["step1"]
    assert open_checkpoint(tmp_path).tag == "step1"
    assert torch.equal(load_full(tmp_path, "step1")["w"], faults.value(1))
    faults.save_value(tmp_path, "step2", 2)
    assert (tmp_path / "step1" / "index.json").is_file()


def test_an_interrupt_stays_an_interrupt_and_frees_the_directory(tmp_path: Path) -> None:
    with mock.patch.object(os, "fsync", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        save(tmp_path, "t", shards=[whole("param", "w", torch.ones(100))], facts={}, state={}, rng={}, axis=Solo())
    faults.save_value(tmp_path, "t", 1)
    assert list_tags(tmp_path) == ["t"]
