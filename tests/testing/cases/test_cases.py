"""What `test_plugin.py` runs in a pytest of its own and then reads the results of. Half of these fail on purpose."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
import unittest
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sheer.testing import rank
from sheer.testing import world_size as size_here


@pytest.fixture(scope="module")
def module_value():
    return {"lock": lambda: rank()}


class TestPassing:
    @pytest.mark.world_size(1, 2)
    def test_group(self, world_size):
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [world_size] * 3
        assert size_here() == dist.get_world_size() == world_size
        assert dist.get_backend() == "gloo"
        assert torch.get_num_threads() == 1
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank()), str(world_size))

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize(("f", "want"), [(lambda: 1, 1), (lambda: 2, 2)], ids=["one", "two"])
    def test_parameters(self, f, want):
        assert f() == want

    @pytest.mark.world_size(2)
    def test_fixtures(self, square, module_value, monkeypatch, capsys, tmp_path):
        monkeypatch.setenv("SHEER_CASE", str(rank()))
        print("seen", os.environ["SHEER_CASE"])
        assert capsys.readouterr().out == f"seen {rank()}\n"
        assert square(3) == 9 + module_value["lock"]()
        (tmp_path / f"{rank()}").touch()
        dist.barrier()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]

    @pytest.mark.world_size(2)
    def test_group_again_by_environment(self):
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == 2

    @pytest.mark.world_size(2)
    def test_raises(self):
        with pytest.raises(ZeroDivisionError):
            _ = 1 / 0


class TestIsolation:
    @pytest.mark.world_size(2)
    def test_spoil(self, tmp_path):
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        torch.manual_seed(7)
        random.seed(7)
        os.environ["SHEER_SPOILT"] = "1"
        del os.environ["PATH"]
        os.chdir(tmp_path)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the pool's own, by which it gets the stacks of test_hang
        dist.new_group([0])

    @pytest.mark.world_size(2)
    def test_unspoilt(self):
        assert torch.get_default_dtype() is torch.float32
        assert torch.empty(1).device.type == "cpu"
        assert torch.get_num_threads() == 1
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.is_grad_enabled()
        assert torch.initial_seed() == 0
        assert "SHEER_SPOILT" not in os.environ
        assert "PATH" in os.environ
        assert Path.cwd() == Path(__file__).parent
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.world_size(2)
class TestNotPassing:
    def test_one_rank_fails(self):
        print("said by", rank())
        print("shouted by", rank(), file=sys.stderr)
        if rank() == 1:
            try:
                _ = 1 / 0
            except ZeroDivisionError:
                left = [1, 2, 3]
                assert left == [1, 2, 4]

    def test_both_ranks_fail(self):
        raise ValueError(f"trouble {rank()}")

    def test_blocked_peer_is_woken(self):
        if rank() == 1:
            raise ValueError("before the barrier")
        dist.barrier()

    @pytest.fixture
    def broken(self):
        raise LookupError("no such fixture value")

    def test_setup_fails(self, broken):
        raise AssertionError("not reached")

    @pytest.fixture
    def leaving(self):
        yield
        raise LookupError("cannot tear down")

    def test_teardown_fails(self, leaving):
        pass

    def test_warning(self):
        warnings.warn("a warning that is an error", stacklevel=1)

    def test_quiet_warning(self):
        warnings.warn("a warning that is none", ImportWarning, stacklevel=1)

    def test_exit(self):
        pytest.exit("the body wants out")

    def test_system_exit(self):
        sys.exit(5)

    def test_skip(self):
        pytest.skip("not today")

    @pytest.mark.skip(reason="by mark")
    def test_skip_by_mark(self):
        raise AssertionError("not reached")

    def test_skip_on_one_rank(self):
        if rank() == 1:
            pytest.skip("only here")

    def test_xfail(self):
        pytest.xfail("known")

    @pytest.mark.xfail(strict=True, reason="known on rank 1")
    def test_xfail_on_one_rank(self):
        assert rank() == 0

    @pytest.mark.xfail(strict=True, reason="thought to be broken")
    def test_xpass(self):
        pass

    @pytest.mark.parametrize("value", [object()], ids=lambda value: hex(id(value)))
    def test_unstable_id(self, value):
        pass


class TestCutOff:
    @pytest.mark.world_size(2, timeout=1)
    def test_hang(self):
        print("about to hang")
        if rank() == 1:
            wait_for_the_other_rank()

    @pytest.mark.world_size(2)
    def test_after_hang(self):
        dist.barrier()

    @pytest.mark.world_size(2)
    def test_exit_code(self):
        if rank() == 0:
            os._exit(3)
        time.sleep(60)

    @pytest.mark.world_size(2)
    def test_segfault(self):
        if rank() == 1:
            ctypes.string_at(0)
        dist.barrier()

    @pytest.mark.world_size(2)
    def test_killed(self):
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    @pytest.mark.world_size(2)
    def test_stuck(self):
        if rank() == 0:
            StuckWhenCollected()

    @pytest.mark.world_size(2)
    def test_after_all(self):
        dist.barrier()


class StuckWhenCollected:
    def __init__(self):
        self.cycle = self

    def __del__(self):
        time.sleep(60)


def wait_for_the_other_rank():
    dist.barrier()


class TestUnittest(unittest.TestCase):
    @pytest.mark.world_size(2)
    def test_refused(self):
        pass


def test_without_mark(module_value):
    assert module_value["lock"]() == 0


def test_fixture_without_mark(world_size):
    pass
