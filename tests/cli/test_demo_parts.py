"""The demo's parts, one by one, without training."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch

from sheer.cli import main
from sheer.cli.demo import examples, folder
from sheer.cli.demo.finish import smooth
from sheer.cli.demo.folder import HEADER, Curve, Folder, Point, prepare, read_curve
from sheer.cli.demo.knobs import Knobs, default_processes
from sheer.cli.demo.launch import free_port
from sheer.cli.demo.link import LONGEST_TEXT, Listener, Reporter
from sheer.errors import UsageError


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `sheer demo` says to arguments it must refuse with exit status 2."""
    try:
        code = main(["demo", *arguments])
    except SystemExit as leaving:  # argparse's own way out
        code = leaving.code
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", "0"], "--steps: 0 is too small; the least is 1"),
        (["--steps", "many"], "--steps: 'many' is not a whole number"),
        (["--lr", "nan"], "--lr: nan is not a finite number above 0"),
        (["--lr", "-1"], "--lr: -1 is not a finite number above 0"),
        (["--stage", "4"], "--stage: 4 is no stage; choose 0, 1, 2 or 3"),
        (["--precision", "fp8"], "--precision: invalid choice: 'fp8'"),
        (["--width", "10", "--heads", "4"], "--width 10 is not a multiple of --heads 4"),
        (["--batch", "3", "--processes", "2"], "is not a multiple of --processes 2"),
        (["--save-every", "0"], "--save-every: 0 is too small"),
    ],
)
def test_bad_values_are_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str
) -> None:
    out = tmp_path / "run"
    assert says in refused(capsys, "--out", str(out), *arguments)
    assert not out.exists()


def test_a_folder_that_cannot_be_made_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be made" in refused(capsys, "--out", str(tmp_path / "file" / "run"))


def test_inductor_without_a_compiler_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    said = refused(capsys, "--out", str(tmp_path / "run"))
    assert "C++ compiler" in said
    assert "--no-compile" in said
    assert not (tmp_path / "run").exists()


def test_knobs_survive_json_and_tell_their_differences() -> None:
    knobs = Knobs(width=64, lr=0.1)
    assert Knobs.from_json(knobs.to_json()) == knobs
    assert knobs.differences(knobs) == []
    assert knobs.differences(Knobs(width=64, lr=0.2)) == ["--lr was 0.1, now 0.2"]


def test_the_engine_config_says_what_the_knobs_say() -> None:
    config = Knobs(processes=4, batch=16, stage=1, precision="bf16", compile=False).engine_config()
    assert config["train_batch_size"] == 16
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["zero_optimization"] == {"stage": 1}
    assert config["bf16"] == {"enabled": True}
    assert config["compile"]["enabled"] is False


def test_the_curve_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    points = [Point(step, 1 / step, 0.1 * step, 1e-3) for step in range(1, 6)]
    path.write_text(HEADER + "".join(point.row() for point in points) + "6,0.1")  # the last row was cut
    assert read_curve(path) == points
    curve = Curve(path, upto=3)
    curve.append(Point(4, 0.5, float("nan"), 1e-3))
    curve.close()
    assert read_curve(path)[:3] == points[:3]
    assert len(read_curve(path)) == 4
    assert path.read_text().count("step") == 1


def test_a_curve_shorter_than_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text(HEADER + Point(1, 1.0, 1.0, 1.0).row())
    with pytest.raises(UsageError, match="does not hold every step up to 2"):
        Curve(path, upto=2)


def test_clear_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    run = prepare(tmp_path, knobs=Knobs())
    run.curve.write_text(HEADER)
    run.checkpoints.mkdir()
    run.log(0).write_text("")
    (tmp_path / "mine.txt").write_text("keep")
    folder.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def with_checkpoint(root: Path) -> Folder:
    run = Folder(root)
    run.checkpoints.mkdir()
    (run.checkpoints / "latest").write_text("global_step1")
    return run


@pytest.mark.parametrize("name", ["config.json", "curve.csv", "sample.txt", "loss.png"])
def test_files_of_somebody_else_are_neither_written_over_nor_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    kept = with_checkpoint(tmp_path).checkpoints / "latest"
    for touch in (lambda: prepare(tmp_path, knobs=Knobs()), lambda: folder.clear(tmp_path)):
        with pytest.raises(UsageError, match=rf"holds .*{name}.* but no knobs\.json.*--out"):
            touch()
    assert (tmp_path / name).read_text() == "mine"
    assert kept.exists()
    assert not Folder(tmp_path).knobs.exists()


@pytest.mark.parametrize(("there_are", "processes"), [(None, 2), (1, 1), (2, 2), (8, 2)])
def test_by_default_no_two_processes_share_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, there_are: int | None, processes: int
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there_are is not None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: there_are)
    assert default_processes() == processes


def test_unreadable_knobs_are_an_error(tmp_path: Path) -> None:
    with_checkpoint(tmp_path).knobs.write_text('{"colour": 1}')
    with pytest.raises(UsageError, match=r"colour.*--fresh"):
        prepare(tmp_path, knobs=Knobs())


def test_knobs_may_change_until_there_is_a_checkpoint(tmp_path: Path) -> None:
    prepare(tmp_path, knobs=Knobs(backend="inductr"))
    run = prepare(tmp_path, knobs=Knobs())
    assert Knobs.from_json(run.knobs.read_text()) == Knobs()
    with_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="--seed was 1234, now 5"):
        prepare(tmp_path, knobs=Knobs(seed=5))


def test_two_demos_in_one_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "LOCK_PATIENCE", 0.0)
    with Folder(tmp_path).locked(), pytest.raises(UsageError, match="another demo is running"):  # noqa: SIM117
        with Folder(tmp_path).locked():
            pytest.fail("both held the lock")
    with Folder(tmp_path).locked() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_events_arrive_whole_and_in_order() -> None:
    receive, send = os.pipe()
    listener, reporter = Listener(receive), Reporter(send)
    reporter.tell("step", step=1, loss=0.5)
    reporter.error("é" * (2 * LONGEST_TEXT))
    first, second = listener.events(patience=1.0)
    assert first == {"event": "step", "step": 1, "loss": 0.5}
    assert second == {"event": "error", "message": "é" * (LONGEST_TEXT // 2)}
    os.write(send, b'{"event": "cut')
    assert list(listener.events(patience=1.0)) == []
    os.write(send, b'"}\n')
    assert list(listener.events(patience=1.0)) == [{"event": "cut"}]
    os.close(send)
    assert list(listener.events(patience=1.0)) == []
    assert listener.ended
    os.close(receive)


def test_the_smoothed_curve_keeps_ends_and_straight_lines() -> None:
    assert smooth([1.0, 2.0, 6.0, 4.0], reach=1) == [1.0, 3.0, 4.0, 4.0]
    assert smooth([float(value) for value in range(9)]) == list(range(9))


def test_the_text_is_split_without_overlap_and_windows_shift_by_one() -> None:
    text = examples.load("text")
    corpus = text.standard_library()
    assert len(corpus.train) > 10 * len(corpus.validation) > 0
    windows = text.Windows(torch.arange(10, dtype=torch.uint8), 4)
    assert len(windows) == 2
    assert windows[1]["tokens"].tolist() == [4, 5, 6, 7]
    assert windows[1]["targets"].tolist() == [5, 6, 7, 8]
    with pytest.raises(IndexError):
        windows[2]


def test_the_example_model_is_a_causal_language_model() -> None:
    gpt = examples.load("gpt")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(context=16, width=32, layers=2, heads=2))
    assert model.head.weight is model.embed.weight
    tokens = torch.randint(0, 256, (2, 16))
    logits = model(tokens)
    assert logits.shape == (2, 16, 256)
    changed = tokens.clone()
    changed[:, 10:] = 0
    torch.testing.assert_close(model(changed)[:, :10], logits[:, :10])
    assert not torch.equal(model(changed)[:, 10:], logits[:, 10:])
    loss = model(tokens, tokens)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
    generator = torch.Generator().manual_seed(1)
    written = gpt.generate(model, b"ab", count=20, generator=generator)
    assert written.startswith(b"ab")
    assert len(written) == 22
    with pytest.raises(ValueError, match="not a multiple"):
        gpt.GPT(gpt.GPTConfig(width=10, heads=3))


def test_a_free_port_is_none_that_the_system_gives_others():
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(given.read_text().split()[0]) if given.exists() else 32768
    assert all(0 < free_port() < end for _ in range(20))
