"""A workload program: started, let go, and the truth that it tells (see tests/workloads/README.md)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

BUILD = Path(__file__).resolve().parents[1] / "workloads/build"
MISSING = 77


class Workload:
    """One run of a workload under a process name of its own."""

    def __init__(self, name: str, *arguments: object, comm: str) -> None:
        self.comm = comm
        self.process = subprocess.Popen(
            [BUILD / name, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LOCKD_COMM": comm},
            text=True,
        )
        line = self._line()
        if self.process.poll() == MISSING:
            pytest.skip(f"host: this kernel lacks what {name} needs")
        assert line.startswith("ready "), f"{name}: said {line!r}"
        self.pid = int(line.split()[1])

    def run(self) -> dict[str, Any]:
        """Let it do its work; the truth."""
        assert self.process.stdin
        self.process.stdin.write("g")
        self.process.stdin.flush()
        line = self._line()
        if self.process.poll() == MISSING:
            pytest.skip(f"host: this kernel lacks what the workload {self.comm} needs")
        truth: dict[str, Any] = json.loads(line)
        return truth

    def finish(self) -> None:
        """Let it end, and see that it was content."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(30) == 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(30)
        return line
