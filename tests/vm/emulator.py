"""What emulated machines need of this host."""

from __future__ import annotations

import os
import platform

import pytest

from tests.needs import absence


def why_no_emulator() -> str:
    """Return why there can be no machines on this host; empty if there can."""
    if platform.machine() != "x86_64":
        return "host: the machines are of x86_64"
    if os.geteuid():
        return "host: making the machines' disks needs root"
    return absence("qemu-system-x86_64", "mmdebstrap", "mke2fs", "gcc", "make")


def need_emulator() -> None:
    """Skip the test if there can be no machines on this host."""
    if reason := why_no_emulator():
        pytest.skip(reason)
