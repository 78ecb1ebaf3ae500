"""Starts a workload program, lets it work, and reads the truth that it tells (tests/workloads/README.md)."""

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
"""Words before a command that hide installed debug files, such as libc6-dbg's: most hosts have none."""


class Workload:
    """One run of a workload under a process name of its own.

    The program's stdin is a socket: its wait for it is of a kind that no workload's truth is about.
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
        """Have the program run before other processes, which would add to the times that it measures."""
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), -20)

    def run(self) -> dict[str, Any]:
        """Let the program do its work, and return the truth."""
        self.go()
        return self.truth()

    def go(self) -> None:
        """Let the program begin its work."""
        self._stdin.send(b"g")

    def truth(self) -> dict[str, Any]:
        """Wait for the end of the program's work, and return the truth."""
        line = self._line()
        if self.process.poll() == MISSING:
            pytest.skip(f"host: this kernel lacks what the workload {self.comm} needs")
        truth: dict[str, Any] = json.loads(line)
        return truth

    def finish(self) -> None:
        """Let the program end, and check that it exits with 0."""
        self._stdin.close()
        assert self.process.wait(30) == 0

    def kill(self) -> None:
        """Kill the program, whatever it does."""
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
"""The pattern of the names of all processes that this run of the tests starts as workloads."""
NUMBERS = itertools.count()
"""The numbers that make these names differ."""
