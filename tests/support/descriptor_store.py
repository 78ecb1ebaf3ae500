"""A stand-in for systemd's descriptor store, which keeps file descriptors for the next start of a service."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support.lockd_process import CHECKOUT, Lockd

FIRST = 3
"""The first descriptor that a service is given (sd_listen_fds(3))."""
MOST = 253
END = b"END=1"
"""A message that no daemon sends. It ends the thread that listens."""
ROOMY = {
    "maps": {"entries": 32768},
    "series": {"max": 200_000},
    "programs": {"futex": {"mode": "calls"}},
}
"""A configuration with room for all that happens on a busy host, also while there is no daemon: what finds no
room is not counted by process. In mode calls more is kept between two starts than in mode blocked."""
STARTER = """
import os, sys
fds, names, command = sys.argv[1].split(), sys.argv[2], sys.argv[3:]
high = [os.dup2(int(fd), 500 + at) for at, fd in enumerate(fds)]
for at, fd in enumerate(high):
    os.dup2(fd, 3 + at)
os.closerange(3 + len(fds), 1000)
if fds:
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=names)
os.execv(command[0], command)
"""


class DescriptorStore:
    """systemd's end of NOTIFY_SOCKET. `kept` has the descriptors that are kept, by name."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "notify")
        self.kept: dict[str, int] = {}
        self.told: list[str] = []
        self._started: list[subprocess.Popen[str]] = []
        self._wrong: list[Exception] = []
        """Errors in messages that are not raised yet."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def start(self, directory: Path, config: dict[str, Any] | None = None) -> Lockd:
        """Start a daemon that is given the kept descriptors. Raises the first error in messages so far."""
        names, fds = list(self.kept), list(self.kept.values())
        starter = [sys.executable, "-c", STARTER, " ".join(map(str, fds)), ":".join(names)]
        environment = {**os.environ, "NOTIFY_SOCKET": self.path}
        program = [*starter, *CHECKOUT]
        one = Lockd(directory, ROOMY | (config or {}), program=program, pass_fds=fds, env=environment)
        self._started.append(one.process)
        self._raise_what_is_wrong()
        return one

    def close(self) -> None:
        """Drop the kept descriptors, as at the stop of a service. Kill daemons that a failed test has left.

        May be called again. Raises the first error in messages.
        """
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait(30)
        if self._listener.is_alive():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
                last.sendto(END, self.path)  # after all messages of daemons
            self._listener.join(30)
            self._socket.close()
            os.unlink(self.path)
        for fd in self.kept.values():
            os.close(fd)
        self.kept.clear()
        self._raise_what_is_wrong()

    def _raise_what_is_wrong(self) -> None:
        wrong, self._wrong = self._wrong, []
        if wrong:
            raise wrong[0]

    def _listen(self) -> None:
        while True:
            text, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, MOST)
            if text == END:
                return
            try:
                self._take(dict(line.split("=", 1) for line in text.decode().splitlines()), fds)
            except Exception as error:  # the daemon goes on, so this must too; the error comes later
                self._wrong.append(error)

    def _take(self, told: dict[str, str], fds: list[int]) -> None:
        name = told.get("FDNAME", "")
        if "FDSTOREREMOVE" in told:
            os.close(self.kept.pop(name))
        elif "FDSTORE" in told:
            assert told["FDPOLL"] == "0"
            assert name not in self.kept, f"{name} is kept already"
            (self.kept[name],) = fds
        self.told.append("\n".join(f"{key}={value}" for key, value in told.items()))
