"""What emulated machines need of this host."""

from __future__ import annotations

import os
import platform

import pytest

from tests.needs import need


def need_emulator() -> None:
    """Skip where there can be no machines."""
    if platform.machine() != "x86_64":
        pytest.skip("host: the machines are of x86_64")
    if os.geteuid():
        pytest.skip("host: making the machines' disks needs root")
    need("qemu-system-x86_64", "mmdebstrap", "mke2fs", "gcc", "make")
