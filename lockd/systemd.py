"""What lockd tells systemd: stages, readiness, and that it is alive; nothing elsewhere."""

from __future__ import annotations

import contextlib
import os
import time


class Systemd:
    """Notifications of a service of Type=notify. Without systemd, or its Python module, does nothing."""

    def __init__(self) -> None:
        self._is_there = "NOTIFY_SOCKET" in os.environ
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

    def stopping(self) -> None:
        self._notify("STOPPING=1\nSTATUS=ending")

    def alive(self) -> None:
        """After every tick; tells the watchdog often enough."""
        now = time.monotonic()
        if self._alive_every and now >= self._next_alive:
            self._next_alive = now + self._alive_every
            self._notify("WATCHDOG=1")

    def _notify(self, text: str) -> None:
        if not self._is_there:
            return
        try:
            from systemd import daemon  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            return
        with contextlib.suppress(OSError):  # who does not listen does not hear
            daemon.notify(text)
