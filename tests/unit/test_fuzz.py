"""Runs each harness of tests/fuzz on its seeds and on inputs made from them, the same inputs each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import MODULES

ROOT = Path(__file__).resolve().parents[2]
INPUTS = "150"
"""The number of inputs of each harness, besides its seeds."""


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_found(module: str, tmp_path: Path) -> None:
    """The harnesses run in a process of their own, since a fault in a library would end it, and with bounded
    memory."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--module", module, "--replay", INPUTS],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("executions") >= 2
