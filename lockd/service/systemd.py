"""What lockd tells systemd: stages, readiness, that it is alive, and what to keep for the next start; nothing
elsewhere."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence


class Systemd:
    """Notifications of a service of Type=notify. Without systemd, or its Python module, does nothing."""

    def __init__(self) -> None:
        self.is_there = "NOTIFY_SOCKET" in os.environ
        watchdog_us = int(os.environ.get("WATCHDOG_USEC", "0"))
        if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            watchdog_us = 0
        self._alive_every = watchdog_us / 4e6
        """Seconds between two signs of life; 0: none are expected."""
        self._next_alive = 0.0
        self._told = ""

    def status(self, text: str) -> None:
        """What `systemctl status` shows; may be told again and again."""
        if text != self._told:
            self._told = text
            self._notify(f"STATUS={text}")

    def ready(self, text: str) -> None:
        self._told = text
        self._notify(f"READY=1\nSTATUS={text}")

    def reloading(self) -> None:
        """To be followed by ready(), once that is done."""
        self._notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._notify("STOPPING=1\nSTATUS=ending")

    def alive(self) -> None:
        """After every tick; tells the watchdog often enough."""
        now = time.monotonic()
        if self._alive_every and now >= self._next_alive:
            self._next_alive = now + self._alive_every
            self._notify("WATCHDOG=1")

    def keep(self, name: str, fd: int) -> None:
        """Have a copy of a descriptor kept for the next start, under a name that no other has.

        It is kept until the service is stopped or has failed (FileDescriptorStoreMax= in the unit), even if
        it could be polled and says that nothing will come of it, as perf events do.
        """
        self._notify(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", [fd])

    def forget(self, name: str) -> None:
        """Have no such descriptor kept any more."""
        self._notify(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def kept(self) -> dict[str, int]:
        """The descriptors that were kept from the last start on, by name. They are told once."""
        if "LISTEN_FDS" not in os.environ:
            return {}
        try:
            from systemd import daemon  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            return {}
        return {name: fd for fd, name in daemon.listen_fds_with_names(unset_environment=True).items()}

    def _notify(self, text: str, fds: Sequence[int] = ()) -> None:
        if not self.is_there:
            return
        try:
            from systemd import daemon
        except ImportError:
            return
        with contextlib.suppress(OSError):  # who does not listen does not hear
            daemon.notify(text, fds=list(fds)) if fds else daemon.notify(text)
