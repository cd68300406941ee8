"""The pytest plugin: `@pytest.mark.world_size(2, 4)` runs a test once per size, on that many processes.

The test function is not run here. Every rank is a pytest session of its own (`worker.py`) that runs the same test item
with its own fixtures; this process (`pool.py`) keeps the ranks warm, watches the clock and merges what they report.
"""

from __future__ import annotations

import pickle
import re
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sheer.testing.pool import Pool, Template, WorkerStartError
from sheer.testing.report import merge
from sheer.testing.wire import WORKER_OPTION, Outcome, Warned

MARK = "world_size"

# Options that are the business of the session a user sees, with the values that switch them off in a worker. A worker
# is told by node id what to run, so nothing may select or reorder; it writes no files and owns no terminal.
_NOT_IN_WORKERS: dict[str, object] = {
    "capture": "no",
    "usepdb": False,
    "trace": False,
    "maxfail": 0,
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "stepwise_skip": False,
    "collectonly": False,
    "xmlpath": None,
    "log_file": None,
    "durations": None,
    "timeout": 0,  # pytest-timeout: the pool has the clock
    "numprocesses": None,  # pytest-xdist
    "dist": "no",
    "tx": [],
    "no_cov": True,  # pytest-cov
}


class World(NamedTuple):
    """What a `world_size` mark asks for."""

    sizes: tuple[int, ...]
    timeout: float | None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini option `world_timeout`."""
    parser.addini("world_timeout", "seconds after which a test marked world_size is cut off", default="60")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and the part that starts processes: not in a worker, which must not start any."""
    config.addinivalue_line(
        "markers",
        "world_size(*sizes, timeout=None): run the test once per size, on that many gloo processes; "
        "cut it off after `timeout` seconds (default: the ini option world_timeout).",
    )
    if not config.getoption(WORKER_OPTION, default=False):
        config.pluginmanager.register(WorldRunner(config), "sheer-world")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a marked test one id per size: `[world2]`, `[world4]`."""
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is None:
        return
    world = read_mark(mark, where=metafunc.definition.nodeid)
    if MARK not in metafunc.fixturenames:
        metafunc.fixturenames.append(MARK)
    metafunc.parametrize(MARK, world.sizes, ids=[f"world{size}" for size in world.sizes], indirect=True)


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """How many processes run this test; for tests marked `world_size`."""
    size = getattr(request, "param", None)
    if size is None:
        pytest.fail(
            "The fixture world_size is only for tests marked with the sizes to run on, "
            "such as @pytest.mark.world_size(2, 4).",
            pytrace=False,
        )
    assert isinstance(size, int)
    return size


def read_mark(mark: pytest.Mark, *, where: str) -> World:
    """Check a `world_size` mark. UsageError says what is wrong with it."""
    problem = None
    if not mark.args:
        problem = "no sizes"
    elif not all(type(size) is int and size > 0 for size in mark.args):
        problem = f"the sizes {', '.join(map(repr, mark.args))}"
    elif len(set(mark.args)) < len(mark.args):
        problem = f"the same size twice in {', '.join(map(repr, mark.args))}"
    elif set(mark.kwargs) - {"timeout"}:
        problem = f"the keyword {', '.join(sorted(set(mark.kwargs) - {'timeout'}))}"
    timeout = mark.kwargs.get("timeout")
    if problem is None and timeout is not None and not (type(timeout) in (int, float) and timeout > 0):
        problem = f"timeout={timeout!r}"
    if problem is not None:
        raise pytest.UsageError(
            f"{where}: the mark world_size got {problem}. It takes one or more different positive integers and, by "
            "keyword, timeout as a positive number of seconds: @pytest.mark.world_size(2, 4, timeout=20)."
        )
    return World(mark.args, timeout)


class WorldRunner:
    """Runs marked tests on the pool, in the session that a user started."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._default_timeout = _seconds(config.getini("world_timeout"))
        self._pool: Pool | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Take over the tests that are marked."""
        mark = item.get_closest_marker(MARK)
        if mark is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, mark, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_unconfigure(self) -> None:
        """End the workers, whatever ended the session."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _reports(
        self, item: pytest.Item, mark: pytest.Mark, nextitem: pytest.Item | None
    ) -> Iterable[pytest.TestReport]:
        call = pytest.CallInfo.from_call(
            lambda: self._run(item, mark), when="call", reraise=(pytest.exit.Exception, KeyboardInterrupt)
        )
        if call.excinfo is None:
            yield from call.result
        else:
            yield item.ihook.pytest_runtest_makereport(item=item, call=call)
        # This test set nothing up here, but the one before may have left fixtures of a wider scope for it.
        teardown = item.session._setupstate.teardown_exact
        after = pytest.CallInfo.from_call(
            lambda: teardown(nextitem), when="teardown", reraise=(pytest.exit.Exception, KeyboardInterrupt)
        )
        if after.excinfo is not None:
            yield pytest.TestReport.from_item_and_call(item, after)

    def _run(self, item: pytest.Item, mark: pytest.Mark) -> list[pytest.TestReport]:
        if not isinstance(item, pytest.Function) or MARK not in getattr(item, "callspec", _NoParams).params:
            pytest.fail(
                f"{item.nodeid} is marked world_size, which works on test functions and on methods of plain classes, "
                f"not on a {type(item).__name__}.",
                pytrace=False,
            )
        size = item.callspec.params[MARK]
        assert isinstance(size, int)
        timeout = read_mark(mark, where=item.nodeid).timeout or self._default_timeout
        start = time.perf_counter()
        try:
            if self._pool is None:
                self._pool = Pool(self._template())
            outcomes = self._pool.run(
                item.nodeid, path=item.path, size=size, timeout=timeout, tmp_path=self._folder(item.name)
            )
        except WorkerStartError as problem:
            pytest.fail(str(problem), pytrace=False)
        self._pass_warnings_on(item, outcomes)
        return merge(item, size=size, outcomes=outcomes, seconds=time.perf_counter() - start)

    def _template(self) -> Template:
        """Options for workers: those of this session that can travel, without those that are its own business."""
        options = {key: value for key, value in vars(self._config.option).items() if _can_travel(value)}
        own = {key: value for key, value in _NOT_IN_WORKERS.items() if key in options}
        plugins = [*self._config.option.plugins, "no:terminal"]
        inipath = self._config.inipath
        place = {"rootdir": str(self._config.rootpath), "inifilename": str(inipath) if inipath else None}
        return Template(
            options=options | own | place | {"plugins": plugins, WORKER_OPTION: True},
            args=[str(arg) for arg in self._config.args],
            folder=self._folder("world"),
            live_output=self._config.getoption("capture") == "no",
        )

    def _folder(self, name: str) -> Path:
        """A fresh directory where pytest keeps those of `tmp_path`."""
        factory: pytest.TempPathFactory = self._config._tmp_path_factory  # type: ignore[attr-defined]
        return factory.mktemp(re.sub(r"\W", "_", name)[:30])

    def _pass_warnings_on(self, item: pytest.Item, outcomes: list[Outcome]) -> None:
        """Show what the ranks were warned of in this session's summary, once and not per rank."""
        said: set[Warned] = set()
        for outcome in outcomes:
            said.update(outcome.finished.warned if outcome.finished else ())
        for warned in sorted(said, key=lambda w: (w.filename, w.lineno, w.text)):
            message = warnings.WarningMessage(warned.text, warned.category, warned.filename, warned.lineno)
            self._config.hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": message, "when": "runtest", "nodeid": item.nodeid, "location": None}
            )


class _NoParams:
    """Stands in for the `callspec` of an item that has none."""

    params: dict[str, Any] = {}


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise pytest.UsageError(f"The ini option world_timeout is {text!r}; it must be a positive number of seconds.")
    return seconds


def _can_travel(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
