"""What a peer leaves behind: DeepSpeed's CPU collectives keep 132 MB of shared memory a pair of ranks after they end.

Nobody else removes it before the machine starts anew, so some dozen runs fill the memory of a small one.
"""

from __future__ import annotations

from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def sweep(port: int | str, folder: Path = SHARED_MEMORY) -> None:
    """Remove the names of the shared memory that DeepSpeed's ranks met on at `port`. Who has it mapped keeps it."""
    for left in folder.glob(f"deepspeed_*_{port}_*"):
        left.unlink(missing_ok=True)
