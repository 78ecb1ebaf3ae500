"""Runs bpftrace beside a trace of lockd, to compare what both say."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.workload import Workload

END_SECONDS = 60.0


@contextmanager
def bpftrace(script: str, program: Workload) -> Iterator[list[dict[str, Any]]]:
    """Run bpftrace until the program ends, at the end of the context. Then the list has its JSON output."""
    printed: list[dict[str, Any]] = []
    end = f"tracepoint:sched:sched_process_exit /pid == {program.pid} && tid == pid/ {{ exit(); }}"
    process = subprocess.Popen(
        ["bpftrace", "-f", "json", "-e", f'{script} {end} BEGIN {{ printf("begun\\n"); }}'],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        while "begun" not in (line := process.stdout.readline()):
            assert line, "bpftrace did not begin"
        yield printed
        program.finish()
        rest, _ = process.communicate(timeout=END_SECONDS)
        printed += [json.loads(line) for line in rest.splitlines() if line]
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
