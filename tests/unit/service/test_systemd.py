"""Descriptors that systemd has stored for a start, as it hands them over (sd_listen_fds(3))."""

from __future__ import annotations

import subprocess
import sys

TAKE = """
import os, sys
from lockd.service.systemd import Systemd
files = [os.memfd_create(name) for name in ("one", "two")]
for fd, file in zip((3, 4), [os.dup(file) for file in files]): os.dup2(file, fd)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="2", LISTEN_FDNAMES="first:second")
systemd = Systemd()
for name, fd in systemd.take_descriptors().items(): print(name, fd, os.readlink(f"/proc/self/fd/{fd}"))
print(systemd.take_descriptors())
"""


def test_each_has_its_name() -> None:
    done = subprocess.run([sys.executable, "-c", TAKE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "first 3 /memfd:one (deleted)",
        "second 4 /memfd:two (deleted)",
        "{}",
    ]
