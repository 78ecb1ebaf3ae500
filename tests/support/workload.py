"""A workload program: started, let go, and the truth that it tells (see tests/workloads/README.md)."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BUILD = Path(__file__).resolve().parents[1] / "workloads/build"
MISSING = 77
WITHOUT_DEBUG_FILES = (
    "/usr/bin/unshare", "--mount", "sh", "-ec",
    'test ! -d /usr/lib/debug || mount -t tmpfs none /usr/lib/debug; exec "$@"', "sh",
)  # fmt: skip
"""What runs a program where no debug files are installed, as on most hosts: libc6-dbg is one of those."""


class Workload:
    """One run of a workload under a process name of its own.

    Its stdin is a socket: reading it is a wait of its own kind, which no workload's truth is about.
    """

    def __init__(self, name: str, *arguments: object, comm: str) -> None:
        self.comm = comm
        self._stdin, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [BUILD / name, *map(str, arguments)],
                stdin=theirs,
                stdout=subprocess.PIPE,
                env={**os.environ, "LOCKD_COMM": comm},
                text=True,
            )
        line = self._line()
        if self.process.poll() == MISSING:
            pytest.skip(f"host: this kernel lacks what {name} needs")
        assert line.startswith("ready "), f"{name}: said {line!r}"
        self.pid = int(line.split()[1])

    def hurry(self) -> None:
        """Have it run before other processes, which else would add to the times that it takes."""
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), -20)

    def run(self) -> dict[str, Any]:
        """Let it do its work; the truth."""
        self.go()
        return self.truth()

    def go(self) -> None:
        """Let it begin its work."""
        self._stdin.send(b"g")

    def truth(self) -> dict[str, Any]:
        """Wait for the end of its work."""
        line = self._line()
        if self.process.poll() == MISSING:
            pytest.skip(f"host: this kernel lacks what the workload {self.comm} needs")
        truth: dict[str, Any] = json.loads(line)
        return truth

    def finish(self) -> None:
        """Let it end, and see that it was content."""
        self._stdin.close()
        assert self.process.wait(30) == 0

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self._stdin.close()

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(30)
        return line


Start = Callable[..., Workload]
"""The fixture `workload`: starts a program of tests/workloads, given its name and arguments."""
OURS = f"*.{os.getpid():x}.*"
"""The names of all processes that this run of the tests starts as workloads."""
NUMBERS = itertools.count()
"""Make these names differ."""
