"""The daemon while it runs: the loop, the exporter that it serves, and the signals that end both."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable

from lockd.children import Exporter
from lockd.config import Config
from lockd.errors import ConfigError, HostError
from lockd.sample.identities import Filter
from lockd.sample.limits import Limits
from lockd.sample.loop import Loop
from lockd.sample.sampler import NS, Sampler, SamplerSettings
from lockd.systemd import Systemd

log = logging.getLogger(__name__)

EXPORTER_PAUSE = 1.0
"""Seconds between two starts of the exporter."""


def sampler_settings(config: Config) -> SamplerSettings:
    """The part of the configuration that the sampler needs."""
    asked = config.filter
    return SamplerSettings(
        Limits(
            max_lines=config.series.max,
            idle_seconds=config.series.idle_ns / NS,
            top_locks=config.series.top_locks,
            buckets_us=config.histogram.buckets_us,
            windows=tuple((window.name, window.ns / NS) for window in config.windows),
        ),
        Filter(asked.units, asked.comms, asked.exclude_comms, asked.pids),
        config.budget.share(os.cpu_count() or 1),
        config.names.parked,
    )


class Daemon:
    """The loop, the exporter it serves, and the signals that end both."""

    def __init__(
        self,
        sampler: Sampler,
        period_ns: int,
        listening: list[socket.socket],
        start_exporter: Callable[[], Exporter],
        systemd: Systemd,
    ) -> None:
        self._sampler = sampler
        self._listening = listening
        self._start_exporter = start_exporter
        self._systemd = systemd
        self._exporter: Exporter | None = None
        self._start_exporter_at = 0.0
        self._exporter_code: int | None = None
        """What the last one ended with, until another is started."""
        self._is_ready = False
        self._status = ""
        self._signal: signal.Signals | None = None
        """What has ended it."""
        wakeup, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._loop = Loop(sampler, period_ns, self._on_message, self._each_tick, wakeup)

    def run(self, exporter: Exporter) -> None:
        """Until SIGTERM or SIGINT. `exporter` has been started; if it ends another will be."""
        signal.set_wakeup_fd(self._woken.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._use(exporter)
        self._loop.run()
        log.info("signal %s: ending", self._signal.name if self._signal else "none")
        self._systemd.stopping()
        if self._exporter:
            self._loop.control = None
            self._exporter.end()
        self._sampler.close()

    def _on_signal(self, number: int, _: object) -> None:
        # No log line from here: this may run within the writing of another, which would raise RuntimeError.
        self._signal = signal.Signals(number)
        self._loop.stop()

    def _use(self, exporter: Exporter) -> None:
        exporter.serve()
        self._exporter, self._loop.control = exporter, exporter.control
        self._sampler.cpu_budget.exporter.follow(exporter.pid)

    def _on_message(self, message: bytes) -> None:
        if message == b"serving":
            places = ", ".join(_place(sock) for sock in self._listening)
            log.info("serving on %s", places)
            if not self._is_ready:
                self._is_ready = True
                self._status = f"sampling; metrics on {places}"
                self._systemd.ready(self._status)
        elif not message and self._exporter:
            self._exporter_ended(self._exporter)

    def _exporter_ended(self, exporter: Exporter) -> None:
        code = exporter.end()
        self._exporter, self._loop.control = None, None
        if not self._is_ready and code == ConfigError.exit_code:
            raise ConfigError("exporter: the web configuration is wrong: see what it said above")
        if not self._is_ready:  # it cannot start at all: its words are in the log
            raise HostError(f"exporter: ended with code {code} before it served anything")
        self._sampler.cpu_budget.exporter.follow(0)
        self._start_exporter_at = time.monotonic() + EXPORTER_PAUSE
        self._exporter_code = code

    def _each_tick(self) -> None:
        self._systemd.alive()
        if self._is_ready:
            words = self._sampler.cpu_budget.words
            self._systemd.status(f"{self._status}; {words}" if words else self._status)
        if not self._exporter and time.monotonic() >= self._start_exporter_at:
            self._replace_exporter()

    def _replace_exporter(self) -> None:
        # Not as soon as it has ended: a supervisor may be ending all processes, and this one last.
        if self._exporter_code is not None:
            log.error("exporter: ended with code %d; starting another", self._exporter_code)
            self._sampler.own_cost.exporter_restarts += 1
            self._exporter_code = None
        try:
            self._use(self._start_exporter())
        except OSError as error:  # too many processes or descriptors: that may pass
            log.error("exporter: cannot be started: %s; trying again", error.strerror)
            self._start_exporter_at = time.monotonic() + EXPORTER_PAUSE


def _place(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
