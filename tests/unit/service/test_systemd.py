"""What systemd hands over to a start (sd_listen_fds(3)), and what it is told after ticks (sd_notify(3))."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


TELL = """
import os, socket, sys
address = sys.argv[1]
systemds = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
systemds.bind(address.replace("@", chr(0)))
os.environ.update(NOTIFY_SOCKET=address, WATCHDOG_USEC="1", WATCHDOG_PID=str(os.getpid()))
from lockd.service.systemd import Systemd
systemd = Systemd()
for number in range(1000):
    systemd.notify_alive()
    systemd.set_status(f"number {number}")
print(systemds.recv(99).decode(), systemds.recv(99).decode(), sep=", ")
try:
    while systemds.recv(99): pass
except BlockingIOError:
    systemd.set_status(f"number {number}")
print(systemds.recv(99).decode())
systemd.set_status(f"number {number}")
print(systemds.recv(99).decode())
"""


@pytest.mark.parametrize("place", ["file", "abstract"])
def test_no_tick_waits_while_systemd_hangs(place: str, tmp_path: Path) -> None:
    address = f"{tmp_path}/notify" if place == "file" else f"@lockd{tmp_path}"
    command = [sys.executable, "-c", TELL, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    told, last, *_ = done.stdout.splitlines()
    assert told == "WATCHDOG=1, STATUS=number 0"
    assert last == "STATUS=number 999", "it is told what was dropped, once"
    assert "BlockingIOError" in done.stderr
