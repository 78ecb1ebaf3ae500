"""What lockd tells systemd: its state, signs of life, and which descriptors to store for the next start."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence


class Systemd:
    """Notifications of a service of Type=notify. Does nothing without systemd.

    Without systemd's Python module, only set_status() and notify_alive() do something.
    """

    def __init__(self) -> None:
        self.is_available = "NOTIFY_SOCKET" in os.environ
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watchdog_us = int(os.environ.get("WATCHDOG_USEC", "0"))
        if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            watchdog_us = 0
        self._alive_every = watchdog_us / 4e6
        """Seconds between two signs of life; 0 if the watchdog expects none."""
        self._next_alive = 0.0
        self._status = ""

    def set_status(self, text: str) -> None:
        """Set the text that `systemctl status` shows. The same text is not sent again.

        To be called after every tick: nothing is sent at a moment when systemd would make lockd wait.
        """
        if text != self._status and self._notify_at_once(f"STATUS={text}"):
            self._status = text

    def notify_ready(self, status: str) -> None:
        """Report that the start, or a reload, is complete."""
        self._status = status
        self._notify(f"READY=1\nSTATUS={status}")

    def notify_reloading(self) -> None:
        """Report that a reload has begun. notify_ready() reports its end."""
        self._notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def notify_stopping(self) -> None:
        self._notify("STOPPING=1\nSTATUS=ending")

    def notify_alive(self) -> None:
        """Send the watchdog a sign of life if one is due.

        To be called after every tick: nothing is sent at a moment when systemd would make lockd wait.
        """
        now = time.monotonic()
        if self._alive_every and now >= self._next_alive and self._notify_at_once("WATCHDOG=1"):
            self._next_alive = now + self._alive_every

    def store_descriptor(self, name: str, fd: int) -> None:
        """Have systemd store a copy of a descriptor for the next start, under a name that no other has.

        The copy stays until the service is stopped or has failed (FileDescriptorStoreMax= in the unit).
        FDPOLL=0 keeps systemd from dropping descriptors that report an error or the end when polled, as perf
        events do.
        """
        self._notify(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", [fd])

    def remove_descriptor(self, name: str) -> None:
        """Have systemd close its copy of a stored descriptor."""
        self._notify(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def take_descriptors(self) -> dict[str, int]:
        """The descriptors that systemd stored for this start, by name. A second call returns none."""
        if "LISTEN_FDS" not in os.environ:
            return {}
        try:
            from systemd import daemon
        except ImportError:
            return {}
        # python-systemd before 235, as Ubuntu 22.04 has it, does not return the names.
        names = os.environ.get("LISTEN_FDNAMES", "").split(":")
        return dict(zip(names, daemon.listen_fds(unset_environment=True), strict=False))

    def _notify_at_once(self, text: str) -> bool:
        """Send a text, unless systemd's queue is full, as when systemd hangs. Returns whether it was sent."""
        if not self._address:
            return False
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.setblocking(False)
            one.sendto(text.encode(), self._address)
            return True
        return False

    def _notify(self, text: str, fds: Sequence[int] = ()) -> None:
        if not self.is_available:
            return
        try:
            from systemd import daemon
        except ImportError:
            return
        with contextlib.suppress(OSError):  # systemd does not listen
            daemon.notify(text, fds=list(fds)) if fds else daemon.notify(text)
