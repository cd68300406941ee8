"""faulthandler's dumps, made readable: with source lines, and without the test runner's own frames."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in .+$')
_RUNNER = ("_pytest", "pluggy")
_OUR_THREAD = re.compile(
    r'^Thread (?:(?!\n\n).)*sheer/testing/worker\.py", line \d+ in _read\n.*?(?:\n\n|\Z)', re.M | re.S
)


def readable(dump: str) -> str:
    """`dump` with the source under each frame; a thread's frames end where pytest called the test.

    The worker's own thread, which listens to pytest's process, is left out.
    """
    lines: list[str] = []
    dump = _OUR_THREAD.sub("", dump)
    in_runner = False
    for line in dump.splitlines():
        frame = _FRAME.match(line)
        if frame is None:
            in_runner = False
            lines.append(line)
            continue
        in_runner = in_runner or any(name in Path(frame["file"]).parts for name in _RUNNER)
        if in_runner:
            continue
        lines.append(line)
        source = linecache.getline(frame["file"], int(frame["line"])).strip()
        if source:
            lines.append(f"    {source}")
    return "\n".join(lines)
