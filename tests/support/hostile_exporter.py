"""Starts programs in place of the exporter, which do not behave as an exporter does."""

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
    """Have lockd.service.exporter.Exporter start a program of BEGINNING and these lines from now on."""
    script = directory / "exporter.py"
    script.write_text(BEGINNING + lines)
    patch.setattr(isolation, "command", lambda module: [sys.executable, "-I", str(script)])
