"""What peers leave in shared memory is removed, and nothing else."""

from __future__ import annotations

from pathlib import Path

from benchmarks.leftovers import sweep


def test_a_sweep_removes_what_ranks_met_on_at_that_port(tmp_path: Path) -> None:
    mine = [tmp_path / f"deepspeed_allreduce_buffer_0_127.0.0.1_12345_{rank}" for rank in range(2)]
    others = [tmp_path / f"deepspeed_allreduce_buffer_0_127.0.0.1_{port}_0" for port in (2345, 54321, 123456)]
    others.append(tmp_path / "psm_12345_0")
    for path in mine + others:
        path.touch()
    sweep(12345, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)
    sweep(12345, tmp_path)
