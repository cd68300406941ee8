"""What pip is told about us. `.ci/run` builds the wheel itself, installs it afresh and looks inside."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import sheer

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_version_is_the_same_everywhere():
    assert metadata.version("sheer") == sheer.__version__
    assert re.search(r'^version = "(.+)"$', PYPROJECT, re.MULTILINE)[1] == sheer.__version__


def test_the_command_and_the_pytest_plugin_are_there():
    points = {(p.group, p.name): p for p in metadata.distribution("sheer").entry_points}
    assert callable(points["console_scripts", "sheer"].load())
    assert points["pytest11", "sheer"].load() is sys.modules["sheer.testing.plugin"]


def test_nothing_is_compiled():
    foreign = [p for p in (ROOT / "src").rglob("*") if p.suffix in {".c", ".cc", ".cpp", ".cu", ".pyx", ".so", ".pyd"}]
    assert foreign == []
    assert re.search(r'^requires = \["hatchling>=[\d.]+"\]$', PYPROJECT, re.MULTILINE)


def test_nothing_that_is_only_for_tests_is_required():
    required = {re.match(r"[\w-]+", r)[0] for r in metadata.requires("sheer") if "extra ==" not in r}
    assert required == {"torch", "numpy", "pydantic", "safetensors", "rich", "xxhash"}
