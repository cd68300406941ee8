"""CSV files, the services (against stand-ins of their packages), and building them from sections."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from sheer.errors import ConfigError
from sheer.monitor import CsvMonitor, TensorBoardMonitor, WandbMonitor, build_monitors


def csv(tmp_path, *steps: int, name: str = "loss") -> None:
    monitor = CsvMonitor(tmp_path, job_name="job")
    for step in steps:
        monitor.write(step, {name: step / 3})
    monitor.close()


def test_one_file_per_name_and_a_line_per_step_that_is_there_at_once(tmp_path):
    monitor = CsvMonitor(tmp_path, job_name="job")
    monitor.write(1, {"loss": 0.1, "train/lr": 3e-4})
    monitor.write(2, {"loss": float("nan")})
    assert (tmp_path / "job" / "loss.csv").read_text() == "step,loss\n1,0.1\n2,nan\n"
    assert (tmp_path / "job" / "train_lr.csv").read_text() == "step,train/lr\n1,0.0003\n"
    monitor.close()
    monitor.close()


def test_a_resumed_run_has_every_step_once(tmp_path):
    csv(tmp_path, 1, 2, 3, 4)
    csv(tmp_path, 3, 4, 5)
    rows = (tmp_path / "job" / "loss.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "1", "2", "3", "4", "5"]
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["loss.csv"]


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path):
    csv(tmp_path, 1, 2)
    path = tmp_path / "job" / "loss.csv"
    path.write_text(path.read_text() + "3")
    csv(tmp_path, 4)
    assert [row.split(",")[0] for row in path.read_text().splitlines()] == ["step", "1", "2", "4"]


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n"])
def test_a_file_of_someone_else_is_left_alone(tmp_path, content):
    (tmp_path / "job").mkdir()
    path = tmp_path / "job" / "loss.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"loss.csv exists, but its first line is not 'step,loss'"):
        csv(tmp_path, 1)
    assert path.read_text() == content


class Recorder:
    """Stands in for a package: remembers every call made on it or on what it returns."""

    def __init__(self, calls: list, name: str) -> None:
        self._calls, self._name = calls, name

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self._calls.append((name, args, kwargs))
            return Recorder(self._calls, name)

        return call


def test_tensorboard_hides_what_a_resumed_run_does_again(monkeypatch, tmp_path):
    calls: list = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Recorder(calls, "tensorboard"))
    monitor = TensorBoardMonitor(tmp_path, job_name="job")
    assert calls == []
    monitor.write(7, {"loss": 0.5, "lr": 0.1})
    monitor.close()
    monitor.close()
    assert calls == [
        ("SummaryWriter", (str(tmp_path / "job"),), {"purge_step": 7}),
        ("add_scalar", ("loss", 0.5, 7), {}),
        ("add_scalar", ("lr", 0.1, 7), {}),
        ("close", (), {}),
    ]


def test_tensorboard_for_real(tmp_path):
    accumulation = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monitor = TensorBoardMonitor(tmp_path, job_name="job")
    monitor.write(1, {"loss": 0.5})
    monitor.write(2, {"loss": 0.25})
    monitor.close()
    events = accumulation.EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]


def test_wandb(monkeypatch):
    calls: list = []
    monkeypatch.setitem(sys.modules, "wandb", Recorder(calls, "wandb"))
    monitor = WandbMonitor(project="p", group="g", team="t")
    monitor.write(3, {"loss": 0.5})
    monitor.close()
    monitor.close()
    assert calls == [
        ("init", (), {"project": "p", "group": "g", "entity": "t"}),
        ("log", ({"loss": 0.5},), {"step": 3}),
        ("finish", (), {}),
    ]


@pytest.mark.parametrize(
    ("build", "module", "package"),
    [
        (lambda path: TensorBoardMonitor(path, job_name="job"), "torch.utils.tensorboard", "tensorboard"),
        (lambda path: WandbMonitor(project="p"), "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_named_with_its_cure(monkeypatch, tmp_path, build, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{package}.enabled=True needs.*pip install {package}"):
        build(tmp_path)


def test_only_enabled_sections_become_monitors(monkeypatch, tmp_path):
    calls: list = []
    monkeypatch.setitem(sys.modules, "wandb", Recorder(calls, "wandb"))
    monkeypatch.chdir(tmp_path)
    off = SimpleNamespace(enabled=False, output_path="", job_name="job")
    on = SimpleNamespace(enabled=True, output_path="", job_name="job")
    wandb_off = SimpleNamespace(enabled=False, project="p", group=None, team=None)
    wandb_on = SimpleNamespace(enabled=True, project="p", group=None, team=None)
    assert build_monitors(off, tensorboard=off, wandb=wandb_off) == ()
    assert not list(tmp_path.iterdir())
    built = build_monitors(on, tensorboard=off, wandb=wandb_on)
    assert [type(monitor) for monitor in built] == [CsvMonitor, WandbMonitor]
    assert (tmp_path / "csv_monitor" / "job").is_dir()
