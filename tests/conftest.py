from __future__ import annotations

import hypothesis

pytest_plugins = ["pytester"]

# Properties draw the same examples in every run, on every rank and machine; none fails for being slow.
hypothesis.settings.register_profile("sheer", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("sheer")


def pytest_ignore_collect(collection_path):
    """The cases of the plugin's tests are run by those tests, in a pytest of their own."""
    return True if collection_path.parts[-3:] == ("tests", "testing", "cases") else None
