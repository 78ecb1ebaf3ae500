"""Programs in place of the exporter's, which do not do what it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockd.process import isolation

BEGINNING = """
import os, socket, sys, time
fd = int(sys.argv[sys.argv.index("--control-fd") + 1])
control = socket.socket(fileno=fd)
control.recv(64)
"""
SERVING = 'control.send(b"serving")\n'


def runs_instead(patch: pytest.MonkeyPatch, directory: Path, lines: str) -> None:
    """From now on lockd.service.exporter.Exporter starts these, after BEGINNING."""
    script = directory / "exporter.py"
    script.write_text(BEGINNING + lines)
    patch.setattr(isolation, "command", lambda module: [sys.executable, "-I", str(script)])
