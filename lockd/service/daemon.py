"""The running daemon: the sampler's loop, the exporter beside it, reloads, and signals.

Daemon connects these parts. It hands messages of the exporter to them. After each tick it sends systemd a
sign of life, checks the exporter and goes on with a reload.
"""

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
from lockd.printable import host_port
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
"""Seconds after the report to systemd that a start is complete. If lockd still runs then, the failures of
earlier starts no longer count (Store.note_lasted())."""

COUNT_SECONDS = 10.0
"""Seconds between two counts of the processors of this machine."""


def sampler_settings(config: Config) -> SamplerSettings:
    """The part of the configuration that the sampler needs."""
    wanted, cpus = config.filter, os.cpu_count() or 1
    return SamplerSettings(
        Limits(
            max_lines=config.series.max,
            idle_seconds=config.series.idle_ns / NS,
            top_locks=config.series.top_locks,
            buckets_us=config.histogram.buckets_us,
            windows=tuple((window.name, window.ns / NS) for window in config.windows),
        ),
        Filter(wanted.units, wanted.comms, wanted.exclude_comms, wanted.pids),
        config.budget.share(cpus),
        cpus,
        config.names.parked,
        config.profile.samples_per_second,
        config.profile.waits_per_second,
    )


class Daemon:
    """Runs the loop of `sampler` until a signal ends it.

    `read` reads the configuration again for a reload. `start_exporter` starts an exporter, and `listening`
    are the sockets on which exporters accept connections.
    """

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
        self._addresses = ", ".join(host_port(*sock.getsockname()[:2]) for sock in listening)
        self._start_exporter = start_exporter
        self._systemd, self._store = systemd, store
        self._is_ready = False
        self._lasts_at = 0.0
        """When to call Store.note_lasted(), by the monotonic clock in seconds; inf after the call."""
        self._next_count = time.monotonic() + COUNT_SECONDS
        """When to count the processors, by the monotonic clock in seconds."""
        self._state: tuple[str, bool, int] | None = None
        """Trouble with the exporter, whether the last reload was successful, and the restraint level."""
        self._text = ""
        """The text of _status() for `_state`."""
        self._signal: signal.Signals | None = None
        """The signal that ends the daemon; None until one has come."""
        wakeup, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._loop = Loop(sampler, config.period_ns, self._on_message, self._after_tick, wakeup)
        self._reloads = Reloads(config, read, self._take_config, systemd.notify_reloading, self._note_reload)
        self._had_terminal = has_terminal()
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as under nohup

    def run(self, exporter: Exporter) -> None:
        """Run until SIGTERM or SIGINT. `exporter` is the first exporter, which was started already."""
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
            self._store.note_failed()
            raise
        finally:
            self._systemd.notify_stopping()
            self._supervisor.end()
            self._sampler.close()

    def _on_signal(self, number: int, _: object) -> None:
        # Nothing may be logged here: if the signal has interrupted the writing of a log line, writing another
        # one raises RuntimeError.
        if number == signal.SIGHUP and (self._outlives_terminal or has_terminal() == self._had_terminal):
            self._reloads.request()
            return
        self._signal = signal.Signals(number)
        self._loop.stop()

    def _follow_exporter(self) -> None:
        """Give the loop the socket, and the sampler the process id, of the exporter that runs at present."""
        exporter = self._supervisor.exporter
        control = exporter.control if exporter else None
        if control is not self._loop.control:
            self._loop.control = control
            self._sampler.follow_exporter(exporter.pid if exporter else 0)
            self._sampler.own_cost.exporter_restarts = self._supervisor.restarts

    def _follow_processors(self) -> None:
        """Have the sampler judge its costs by the processors that there are now.

        A virtual machine can get more of them, or lose some, while it runs.
        """
        now = time.monotonic()
        if now < self._next_count:
            return
        self._next_count = now + COUNT_SECONDS
        before, cpus = self._sampler.cpu_budget.cpus, os.cpu_count() or 1
        if cpus != before:
            log.info("this machine has %d processors now; it had %d", cpus, before)
            self._sampler.reload(sampler_settings(self._reloads.running))

    def _take_config(self, config: Config) -> None:
        """Take the configuration of a reload, except the exporter's part, which Reloads sends to the
        exporter."""
        logs.set_level(config.log.level)
        self._loop.period_ns = config.period_ns
        self._sampler.reload(sampler_settings(config))

    def _note_reload(self) -> None:
        self._sampler.own_cost.note_reload(self._reloads.was_successful, len(self._reloads.waiting))
        self._systemd.notify_ready(self._status())

    def _on_message(self, message: bytes) -> None:
        self._reloads.handle_message(message)
        if self._supervisor.handle_message(message):
            log.info("serving on %s", self._addresses)
            if not self._is_ready:
                self._is_ready = True
                self._lasts_at = time.monotonic() + LASTED_SECONDS
                self._store.note_started()
                self._systemd.notify_ready(self._status())
        self._follow_exporter()

    def _after_tick(self) -> None:
        self._systemd.notify_alive()
        self._supervisor.check_exporter()
        self._follow_exporter()
        self._follow_processors()
        if self._is_ready:
            self._reloads.advance(self._supervisor.exporter)
            self._systemd.set_status(self._status())
            if self._lasts_at < time.monotonic():
                self._lasts_at = inf
                self._store.note_lasted()

    def _status(self) -> str:
        """The text for `systemctl status`. It is made anew only if `_state` has changed."""
        budget, was_reloaded = self._sampler.cpu_budget, self._reloads.was_successful
        state = self._supervisor.trouble, was_reloaded, budget.restraint.level
        if state != self._state:
            trouble, self._state = self._supervisor.trouble, state
            served = f"metrics on {self._addresses}"
            if trouble:
                served = f"no metrics are served, exporter: {trouble}"
            reload_trouble = "" if was_reloaded else "the last reload failed"
            self._text = "; ".join(filter(None, ("sampling", served, reload_trouble, budget.description)))
        return self._text


def has_terminal() -> bool:
    """Whether the daemon has a terminal.

    The kernel sends SIGHUP also when the terminal goes away, which is no request for a reload.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True
