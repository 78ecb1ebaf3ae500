"""Runs `lockd trace` as a script does, without a terminal, and returns its exit code and each of its outputs.

This is for tests of how a trace begins and ends. trace_process.py is for tests of what a trace finds.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.support.lockd_process import CANNOT, CHECKOUT, ROOT, is_lack

ATTACHED_SECONDS = 300.0
"""The time that a trace may take to attach: an emulated machine compiles for minutes."""
END_SECONDS = 120.0


@dataclass(frozen=True)
class Done:
    """The result of a trace."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> int:
        """The number of events that the trace reports."""
        return int(self._reported(r"([\d,]+) events").replace(",", ""))

    @property
    def lost(self) -> str:
        """What the trace reports to have lost; `none` if nothing."""
        return self._reported(r"lost: (.*)$")

    def _reported(self, pattern: str) -> str:
        found = re.search(pattern, self.err, re.MULTILINE)
        assert found, self.err
        return found[1]


class Trace:
    """A running trace, as a context: at the start of the context, everything is attached.

    Skips the test if this kernel lacks something for the trace. `how` has arguments of Popen.
    """

    def __init__(self, *words: object, **how: Any) -> None:
        command = [*CHECKOUT, "trace", *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **{"cwd": ROOT, **pipes, **how})

    def __enter__(self) -> Trace:
        deadline = time.monotonic() + ATTACHED_SECONDS
        while not self.is_tracing:
            if self.process.poll() is not None:
                done = self.finish()
                if done.code == CANNOT and is_lack(done.err):
                    pytest.skip(f"host: {done.err.strip()}")
                raise AssertionError(f"ended with code {done.code}: {done.err}")
            assert time.monotonic() < deadline, f"not attached within {ATTACHED_SECONDS:g} s"
            time.sleep(0.02)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    @property
    def is_tracing(self) -> bool:
        """Whether everything is attached: from then on, the trace catches SIGTERM."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except FileNotFoundError:
            return False
        caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)

    def stop(self, number: int = signal.SIGINT) -> Done:
        """End the trace by a signal, by default as Ctrl-C does, and return its result."""
        os.kill(self.process.pid, number)
        return self.finish()

    def finish(self) -> Done:
        """Wait for the end of the trace, and return its result."""
        out, err = self.process.communicate(timeout=END_SECONDS)
        return Done(self.process.returncode, out or "", err or "")


def trace(*words: object, **how: Any) -> Done:
    """Run a trace that ends by itself, or at once, and return its result."""
    command = [*CHECKOUT, "trace", *map(str, words)]
    default = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": END_SECONDS}
    done = subprocess.run(command, check=False, **{**default, **how})
    return Done(done.returncode, done.stdout, done.stderr)
