from __future__ import annotations

import pytest

from sheer.testing import rank


@pytest.fixture
def square():
    """A value that cannot be pickled: every rank makes its own."""
    return lambda x: x * x + rank()
