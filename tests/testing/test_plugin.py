"""The pytest plugin, seen from outside.

One run of `cases/` in a pytest of its own, whose results are read here; then a few runs that end badly.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.timeout(300)
CASES = Path(__file__).with_name("cases")
OPTIONS = ["-p", "no:cacheprovider", "-rA", "-W", "error", "-W", "default::ImportWarning"]


class Case(NamedTuple):
    outcome: str
    text: str


class Run(NamedTuple):
    cases: dict[str, Case]
    output: str
    status: int


def command(folder: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *OPTIONS, f"--basetemp={folder}-tmp", *args]


def processes_of(folder: Path) -> list[int]:
    """Processes that run in `folder`, which no other test uses."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                found.append(int(entry.name))
        except OSError:  # it ended meanwhile, or is not ours
            continue
    return found


def nothing_left(folder: Path, *, within: float) -> bool:
    deadline = time.monotonic() + within
    while processes_of(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("cases")
    for file in CASES.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    ended = subprocess.run(
        command(folder, "--junitxml=results.xml"), cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert nothing_left(folder, within=5), ended.stdout
    cases = {}
    for case in ElementTree.parse(folder / "results.xml").iter("testcase"):
        told = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = "passed" if not told else " and ".join(child.tag for child in told)
        cases[case.attrib["name"]] = Case(outcome, "\n".join(f"{c.get('message')}\n{c.text}" for c in told))
    return Run(cases, ended.stdout + ended.stderr, ended.returncode)


@pytest.mark.parametrize(
    "name",
    [
        "test_group[world1]",
        "test_group[world2]",
        "test_parameters[world2-one]",
        "test_parameters[world2-two]",
        "test_fixtures[world2]",
        "test_group_again_by_environment[world2]",
        "test_raises[world2]",
        "test_spoil[world2]",
        "test_unspoilt[world2]",
        "test_quiet_warning[world2]",
        "test_after_hang[world2]",
        "test_after_all[world2]",
        "test_without_mark",
    ],
)
def test_passes(run, name):
    assert run.cases[name] == Case("passed", "")


def test_a_failure_of_one_rank_is_told_with_assertion_chain_and_output(run):
    outcome, text = run.cases["test_one_rank_fails[world2]"]
    assert outcome == "failure"
    assert "rank 1 of 2 failed in call" in text
    assert "ZeroDivisionError: division by zero" in text
    assert "During handling of the above exception" in text
    assert "assert [1, 2, 3] == [1, 2, 4]" in text
    assert "At index 2 diff: 3 != 4" in text
    assert "rank 0 of 2 passed" in text
    for stream, words in (("stdout", "said by"), ("stderr", "shouted by")):
        for rank in (0, 1):
            assert f"Captured {stream} of rank {rank} " in run.output
            assert f"{words} {rank}\n" in run.output


def test_failures_of_all_ranks_are_told(run):
    outcome, text = run.cases["test_both_ranks_fail[world2]"]
    assert outcome == "failure"
    assert "ValueError: trouble 0" in text
    assert "ValueError: trouble 1" in text


def test_the_first_failure_heads_the_story_of_a_peer_that_it_woke(run):
    outcome, text = run.cases["test_blocked_peer_is_woken[world2]"]
    assert outcome == "failure"
    assert "rank 1: ValueError: before the barrier" in text
    assert text.index("rank 1 of 2 failed") < text.index("rank 0 of 2 failed")
    assert "Connection closed by peer" in text


@pytest.mark.parametrize(("name", "words"), [("setup", "no such fixture value"), ("teardown", "cannot tear down")])
def test_fixtures_that_fail_are_errors_of_their_phase(run, name, words):
    outcome, text = run.cases[f"test_{name}_fails[world2]"]
    assert outcome == "error"
    for rank in (0, 1):
        assert f"rank {rank} of 2 failed in {name}" in text
    assert text.count(f"LookupError: {words}") >= 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_warning", "UserWarning: a warning that is an error"),
        ("test_exit", "the body wants out"),
        ("test_system_exit", "SystemExit: 5"),
        ("test_xpass", "[XPASS(strict)] thought to be broken"),
    ],
)
def test_fails(run, name, words):
    outcome, text = run.cases[f"{name}[world2]"]
    assert outcome == "failure"
    assert words in text


def test_warnings_of_workers_reach_the_summary_once(run):
    summary = run.output.partition("warnings summary")[2]
    assert summary.count("ImportWarning: a warning that is none") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_skip", "not today"),
        ("test_skip_by_mark", "by mark"),
        ("test_xfail", "known"),
        ("test_xfail_on_one_rank", "known on rank 1"),
    ],
)
def test_skips_and_expected_failures(run, name, words):
    outcome, text = run.cases[f"{name}[world2]"]
    assert outcome == "skipped"
    assert words in text


def test_a_skip_on_some_ranks_is_a_failure(run):
    outcome, text = run.cases["test_skip_on_one_rank[world2]"]
    assert outcome == "failure"
    assert "the ranks disagree: passed on rank 0; skipped on rank 1" in text
    assert "rank 1 of 2 skipped: Skipped: only here" in text


def test_an_id_that_differs_between_processes_is_explained(run):
    name = next(name for name in run.cases if name.startswith("test_unstable_id"))
    outcome, text = run.cases[name]
    assert outcome == "error"
    assert "must have the same id in each of them" in text


def test_a_hang_is_cut_off_with_the_stack(run):
    outcome, text = run.cases["test_hang[world2]"]
    assert outcome == "failure"
    assert "rank 1 of 2: it was cut off at the test's timeout" in text
    assert "in wait_for_the_other_rank\n    dist.barrier()" in text
    assert "in test_hang\n    wait_for_the_other_rank()" in text
    assert "_pytest" not in text
    assert "rank 0 of 2 passed" in text
    assert "about to hang" in run.output


@pytest.mark.parametrize(
    ("name", "dead", "words"),
    [
        ("test_exit_code", 0, "its process exited with code 3"),
        ("test_killed", 1, "its process was killed by SIGKILL"),
        ("test_segfault", 1, "its process was killed by SIGSEGV"),
    ],
)
def test_a_dead_worker_is_named(run, name, dead, words):
    outcome, text = run.cases[f"{name}[world2]"]
    assert outcome == "failure"
    assert f"rank {dead}: {words}" in text
    assert f"rank {dead} of 2: its process ended" in text
    assert f"rank {1 - dead} of 2" in text


def test_a_segfault_has_a_stack(run):
    assert "ctypes.string_at(0)" in run.cases["test_segfault[world2]"].text


def test_peers_of_a_dead_worker_are_cut_off_with_their_stacks(run):
    text = run.cases["test_exit_code[world2]"].text
    assert "rank 1 of 2: it was cut off shortly after another rank had ended without passing" in text
    assert "in test_exit_code\n    time.sleep(60)" in text


def test_a_rank_that_cannot_leave_is_told(run):
    outcome, text = run.cases["test_stuck[world2]"]
    assert outcome == "failure"
    assert "rank 0 of 2: it passed, but did not come back" in text
    assert "in __del__\n    time.sleep(60)" in text


def test_what_cannot_run_on_several_processes_is_refused(run):
    assert "not on a TestCaseFunction" in run.cases["test_refused"].text
    assert "only for tests marked with the sizes" in run.cases["test_fixture_without_mark"].text


# -- runs that end badly, or do not begin ------------------------------------------------------------------------------

SLEEPS = """
import time, pytest
from pathlib import Path
from sheer.testing import rank

@pytest.mark.world_size(2)
def test_sleeps():
    Path(f"started{rank()}").touch()
    time.sleep(600)
"""


@pytest.fixture
def sleeping(tmp_path):
    """A pytest whose two workers sleep."""
    (tmp_path / "test_sleeps.py").write_text(SLEEPS)
    process = subprocess.Popen(command(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / f"started{rank}").exists() for rank in (0, 1)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(processes_of(tmp_path)) == 3
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_pytest(sleeping, tmp_path, number):
    sleeping.send_signal(number)
    output, _ = sleeping.communicate(timeout=20)
    assert nothing_left(tmp_path, within=5)
    assert ("KeyboardInterrupt" in output) == (number == signal.SIGINT)


@pytest.mark.parametrize(
    ("mark", "problem"),
    [
        ("()", "got no sizes"),
        ("(0)", "got the sizes 0"),
        ("(2, '4')", "got the sizes 2, '4'"),
        ("(2, 2)", "got the same size twice in 2, 2"),
        ("(2, timeout=-1)", "got timeout=-1"),
        ("(2, time=1)", "got the keyword time"),
    ],
)
def test_a_wrong_mark_is_explained(pytester, mark, problem):
    pytester.makepyfile(f"import pytest\n@pytest.mark.world_size{mark}\ndef test(): pass")
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*the mark world_size {problem}. It takes one or more*"])


def test_a_wrong_ini_option_is_explained(pytester):
    pytester.makepyfile("def test(): pass")
    result = pytester.runpytest("-o", "world_timeout=soon")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*world_timeout is 'soon'; it must be a positive number of seconds*"])


def test_a_worker_that_does_not_start_is_explained(pytester):
    pytester.makeconftest(
        "def pytest_configure(config):\n    if hasattr(config, 'workerinput'): raise RuntimeError('not in a worker')"
    )
    pytester.makepyfile("import pytest\n@pytest.mark.world_size(1)\ndef test(): pass")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=60)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*A worker for a test with world_size(1) did not start.", "*RuntimeError: not in a worker"]
    )


def test_selection_and_wider_fixtures(pytester):
    """`-k` selects as ever; wider fixtures of the session's own process are torn down in order around marked tests."""
    pytester.makepyfile(
        test_one="""
        import pytest
        @pytest.fixture(scope="module")
        def wide():
            yield 1
            print("TORN DOWN")
        def test_before(wide): pass
        @pytest.mark.world_size(1)
        def test_ranked(wide): assert wide == 1
        @pytest.mark.world_size(1)
        def test_unwanted(wide): assert False
        """,
        test_two="def test_after(): print('AFTER')",
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-s", "-k", "not unwanted", "-x", timeout=60)
    result.assert_outcomes(passed=3, deselected=1)
    result.stdout.fnmatch_lines(["*TORN DOWN*", "*AFTER*"])


def test_under_xdist_every_process_has_ranks_of_its_own(pytester):
    for name in ("one", "two"):
        pytester.makepyfile(
            **{
                f"test_{name}": """
                import os, pytest
                @pytest.mark.world_size(1)
                def test_here():
                    print("SPAWNED BY", os.getppid())
                """
            }
        )
    result = pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "-rP", timeout=100
    )
    result.assert_outcomes(passed=2)
    parents = {line for line in result.outlines if line.startswith("SPAWNED BY")}
    assert len(parents) == 2
