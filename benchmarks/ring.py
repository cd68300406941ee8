"""Contenders taking turns: A B C A B C ..., each in processes and a process group of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.contenders import environment
from benchmarks.leftovers import sweep
from sheer.cli.demo.launch import free_port

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 240.0
"""Seconds until a rank that does not answer is given up."""


class FailedError(Exception):
    """A contender raised, died or did not answer."""


class Turn(NamedTuple):
    """Of all ranks of one contender."""

    seconds: float
    """Per step, of the slowest rank."""
    busy: float
    """CPU seconds per step, of all threads of all ranks: what other work on the machine disturbs least."""
    sent: float
    """Bytes per step, of the rank that sent most."""
    losses: list[list[float]]
    """By rank and step."""


class Ring:
    """One contender's ranks, waiting for their turn."""

    def __init__(self, name: str, *, ranks: int) -> None:
        self.name = name
        self._port = port = free_port()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the processes
        self._ranks = [_Rank(name, environment(name, rank=r, ranks=ranks, port=port), self._log) for r in range(ranks)]

    def build(
        self,
        *,
        workload: str,
        compiled: bool = False,
        accumulation: int = 1,
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.ask("build", workload=workload, compiled=compiled, accumulation=accumulation, config=dict(config))

    def turn(self, steps: int) -> Turn:
        answers = self.ask("turn", steps=steps)
        return Turn(
            max(answer["seconds"] for answer in answers),
            sum(answer["busy"] for answer in answers),
            max(answer["sent"] for answer in answers),
            [answer["losses"] for answer in answers],
        )

    def close(self) -> None:
        self.ask("close")

    def ask(self, command: str, **arguments: Any) -> list[dict[str, Any]]:
        """Every rank's answer to a command of worker.py."""
        try:
            for rank in self._ranks:
                rank.send(command, arguments)
            return self._receive()
        except (FailedError, BrokenPipeError) as error:
            self.stop()
            raise FailedError(f"{error}" or "a rank died") from error

    def _receive(self) -> list[dict[str, Any]]:
        """The first rank that fails speaks for all: others may wait for it forever."""
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._ranks):
            waiting = {rank.answers: number for number, rank in enumerate(self._ranks) if number not in answers}
            ready, _, _ = select.select(list(waiting), [], [], PATIENCE)
            if not ready:
                raise FailedError(f"no answer in {PATIENCE:.0f} s")
            for stream in ready:
                line = stream.readline()
                answer = json.loads(line) if line else {"error": "a rank died"}
                if "error" in answer:
                    raise FailedError(answer["error"])
                answers[waiting[stream]] = answer
        return [answers[number] for number in sorted(answers)]

    def printed(self) -> str:
        """What the ranks printed."""
        self._log.seek(0)
        return self._log.read()

    def stop(self) -> None:
        """End the processes, with all that they leave."""
        for rank in self._ranks:
            rank.stop()
        sweep(self._port)


class _Rank:
    def __init__(self, name: str, variables: dict[str, str], log: Any) -> None:
        read, write = os.pipe()
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [variables.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", name, str(write)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[write],
            text=True,
        )
        os.close(write)
        self.answers = os.fdopen(read)

    def send(self, command: str, arguments: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps([command, arguments]), file=self._process.stdin, flush=True)

    def stop(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
