"""The `sheer` command itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sheer
from sheer.cli import COMMANDS, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    for name in COMMANDS:
        assert name in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"sheer {sheer.__version__}\n"


def test_the_package_is_the_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "sheer", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"sheer {sheer.__version__}\n"


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["dmeo"])
    assert "dmeo" in capsys.readouterr().err


def test_help_of_the_demo_imports_neither_torch_nor_the_other_commands() -> None:
    program = (
        "import sys\nfrom sheer.cli import main\n"
        "try: main(['demo', '--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules\nassert 'sheer.cli.config' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--steps" in done.stdout


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    program = "import sys; from sheer.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "config", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before the command has said anything
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=30) == 1
