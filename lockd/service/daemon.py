"""The daemon while it runs: the loop, the exporter that it serves, reloads, and the signals that end all."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from math import inf

from lockd import logs
from lockd.config.schema import Config
from lockd.process.clock import NS
from lockd.sample.aggregates.identities import Filter
from lockd.sample.loop import Loop
from lockd.sample.sampler import Sampler, SamplerSettings
from lockd.sample.series.limits import Limits
from lockd.service.exporter import Exporter, Supervisor
from lockd.service.reload import Reloads
from lockd.service.store import Store
from lockd.service.systemd import Systemd

log = logging.getLogger(__name__)

LASTED_SECONDS = 60.0
"""A start that was ready for so long has not failed."""


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
        config: Config,
        read: Callable[[], Config],
        listening: list[socket.socket],
        start_exporter: Callable[[Config], Exporter],
        systemd: Systemd,
        store: Store,
    ) -> None:
        self._sampler = sampler
        self._places = ", ".join(_place(sock) for sock in listening)
        self._start_exporter = start_exporter
        self._systemd, self._store = systemd, store
        self._is_ready = False
        self._lasts_at = 0.0
        """When a start that is ready will have lasted."""
        self._signal: signal.Signals | None = None
        """What has ended it."""
        wakeup, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._loop = Loop(sampler, config.period_ns, self._on_message, self._each_tick, wakeup)
        self._reloads = Reloads(config, read, self._take, systemd.reloading, self._reloaded)
        self._had_terminal = has_terminal()

    def run(self, exporter: Exporter) -> None:
        """Until SIGTERM or SIGINT. `exporter` has been started; if it ends another will be."""
        signal.set_wakeup_fd(self._woken.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._supervisor = Supervisor(lambda: self._start_exporter(self._reloads.running), exporter)
        self._follow_exporter()
        try:
            self._loop.run()
            log.info("signal %s: ending", self._signal.name if self._signal else "none")
            self._sampler.fold()
            self._sampler.save(is_end=True)
        except BaseException:
            self._store.has_failed()
            raise
        finally:
            self._systemd.stopping()
            self._supervisor.end()
            self._sampler.close()

    def _on_signal(self, number: int, _: object) -> None:
        # No log line from here: this may run within the writing of another, which would raise RuntimeError.
        if number == signal.SIGHUP and has_terminal() == self._had_terminal:
            self._reloads.ask()
            return
        self._signal = signal.Signals(number)
        self._loop.stop()

    def _follow_exporter(self) -> None:
        exporter = self._supervisor.exporter
        control = exporter.control if exporter else None
        if control is not self._loop.control:
            self._loop.control = control
            self._sampler.cpu_budget.exporter.follow(exporter.pid if exporter else 0)
            self._sampler.own_cost.exporter_restarts = self._supervisor.restarts

    def _take(self, config: Config) -> None:
        """What a reload has changed, but for the exporter, which is told."""
        logs.set_level(config.log.level)
        self._loop.period_ns = config.period_ns
        self._sampler.reload(sampler_settings(config))

    def _reloaded(self) -> None:
        self._sampler.own_cost.note_reload(self._reloads.was_successful, len(self._reloads.waiting))
        self._systemd.ready(self._status())

    def _on_message(self, message: bytes) -> None:
        self._reloads.answered(message)
        if self._supervisor.note(message):
            log.info("serving on %s", self._places)
            if not self._is_ready:
                self._is_ready = True
                self._lasts_at = time.monotonic() + LASTED_SECONDS
                self._store.has_started()
                self._systemd.ready(self._status())
        self._follow_exporter()

    def _each_tick(self) -> None:
        self._systemd.alive()
        self._supervisor.look()
        self._follow_exporter()
        if self._is_ready:
            self._reloads.look(self._supervisor.exporter)
            self._systemd.status(self._status())
            if self._lasts_at < time.monotonic():
                self._lasts_at = inf
                self._store.has_lasted()

    def _status(self) -> str:
        trouble = self._supervisor.trouble
        served = f"no metrics are served, exporter: {trouble}" if trouble else f"metrics on {self._places}"
        trouble_of_reload = "" if self._reloads.was_successful else "the last reload failed"
        return "; ".join(
            filter(None, ("sampling", served, trouble_of_reload, self._sampler.cpu_budget.description))
        )


def has_terminal() -> bool:
    """Whether somebody can still press Ctrl-C; SIGHUP says as well that a terminal is gone."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _place(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
