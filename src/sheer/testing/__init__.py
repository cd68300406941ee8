"""Tests on several processes: `@pytest.mark.world_size(2, 4)`, a pytest plugin that any project may use.

Installing sheer is enough: pytest finds the plugin by its entry point. The manual is `docs/testing.md`.
"""

from __future__ import annotations


def rank() -> int:
    """This process's rank in the default process group; 0 where there is none."""
    from torch import distributed

    return distributed.get_rank() if distributed.is_initialized() else 0


def world_size() -> int:
    """How many processes run this test; 1 where there is no process group."""
    from torch import distributed

    return distributed.get_world_size() if distributed.is_initialized() else 1


__all__ = ["rank", "world_size"]
