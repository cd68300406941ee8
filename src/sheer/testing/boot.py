"""The first lines of a worker process: become a pytest, then a rank. The pool runs this file as a script.

It imports nothing of sheer before pytest is configured. Otherwise pytest would warn (an error under `-W error`) that it
cannot rewrite the assertions of a plugin that is already imported.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

import pytest


def main() -> None:
    """Take the setup from the pipe whose descriptor is the first argument, and serve."""
    connection = Connection(int(sys.argv[1]))
    setup = connection.recv()  # a dict of plain values, for the same reason
    sys.path[:] = setup["sys_path"]
    config = pytest.Config.fromdictargs(setup["options"], setup["args"])
    from sheer.testing.worker import serve

    serve(config, connection, setup)


if __name__ == "__main__":
    main()
