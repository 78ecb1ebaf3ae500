"""`lockd trace` as a script starts it, without a terminal: exit code, and each of its outputs.

For tests of how a trace begins and ends; trace_process.py is for those of what it finds.
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
"""An emulated machine compiles for minutes."""
END_SECONDS = 120.0


@dataclass(frozen=True)
class Done:
    """What a trace came to."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> int:
        """That it reports to have counted."""
        return int(self._reported(r"([\d,]+) events").replace(",", ""))

    @property
    def seconds(self) -> float:
        """That it reports to have taken, to a tenth."""
        return float(self._reported(r"([\d.]+) s, [\d,]+ events"))

    @property
    def lost(self) -> str:
        """What it reports to have lost; `none` if nothing."""
        return self._reported(r"lost: (.*)$")

    def _reported(self, pattern: str) -> str:
        found = re.search(pattern, self.err, re.MULTILINE)
        assert found, self.err
        return found[1]


class Trace:
    """A context, at whose start the trace is attached to all that it is about.

    Skips the test if this kernel lacks something for it. `how` is for Popen.
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
        """Whether it is attached: from then on it has a use for SIGTERM."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except FileNotFoundError:
            return False
        caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)

    def stop(self, number: int = signal.SIGINT) -> Done:
        """Have it print what it has."""
        os.kill(self.process.pid, number)
        return self.finish()

    def finish(self) -> Done:
        """Wait for its end."""
        out, err = self.process.communicate(timeout=END_SECONDS)
        return Done(self.process.returncode, out or "", err or "")


def trace(*words: object, **how: Any) -> Done:
    """A trace that ends by itself, or at once."""
    command = [*CHECKOUT, "trace", *map(str, words)]
    default = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": END_SECONDS}
    done = subprocess.run(command, check=False, **{**default, **how})
    return Done(done.returncode, done.stdout, done.stderr)
