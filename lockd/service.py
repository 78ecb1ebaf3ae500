"""The daemon from start to end: load, drop privileges, start the exporter, sample."""

from __future__ import annotations

import ctypes
import logging
import signal
import socket
import threading
import time
from pathlib import Path

from lockd import logs, privileges
from lockd.children import Exporter, listen, run_loader
from lockd.config import Config, Program
from lockd.errors import HostError
from lockd.libbpf import libbpf
from lockd.load.settings import LoadSettings
from lockd.manifest import Manifest
from lockd.sample.identities import Filter
from lockd.sample.limits import Limits
from lockd.sample.loop import Loop
from lockd.sample.sampler import NS, Sampler, SamplerSettings
from lockd.systemd import Systemd

log = logging.getLogger(__name__)

NAMING = {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG"}
"""To read other processes' maps, cgroups by id, and kernel symbols."""
RESTARTING = {"CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"}
"""To start another exporter as an unprivileged user if it ends."""
MAPS = {"CAP_BPF", "CAP_SYS_ADMIN"}
"""To read maps before 5.19 (c8644cd0efe7): one of them, whichever there is."""
LONGEST = 2**63 - 1
EXPORTER_PAUSE = 1.0
"""Seconds between two starts of the exporter."""


def run(config: Config, addresses: list[tuple[str, int]], web_config: Path | None, strict: bool) -> int:
    """The daemon; returns 0 after SIGTERM or SIGINT. Raises LockdError if it cannot start."""
    logs.setup(config.log.level, process="sampler")
    systemd = Systemd()
    listening = listen(addresses)
    systemd.status("compiling and attaching the BPF programs")
    manifest, fds = run_loader(load_settings(config))
    _report_hooks(manifest, strict)
    _drop_privileges(manifest, fds)
    systemd.status("starting the exporter")
    sampler = Sampler(manifest, fds, sampler_settings(config))
    Daemon(sampler, config, listening, web_config, systemd).run()
    return 0


def load_settings(config: Config) -> LoadSettings:
    """The part of the configuration that is compiled into the programs."""
    asked = config.programs
    programs: dict[str, Program] = {
        "futex": asked.futex,
        "offcpu": asked.offcpu,
        "kernel_locks": asked.kernel_locks,
    }
    enabled = {name: program for name, program in programs.items() if program.enabled}
    longest = config.filter.max_block_ns
    return LoadSettings(
        programs=tuple(enabled),
        entries=config.maps.entries,
        threads=config.maps.threads,
        stacks=config.maps.stacks,
        min_block_ns=config.filter.min_block_ns,
        max_block_ns=LONGEST if longest is None else longest,
        lock_mode=asked.kernel_locks.mode,
        mechanisms=tuple((name, program.mechanism) for name, program in enabled.items()),
    )


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
    )


class Daemon:
    """The loop, the exporter it serves, and the signals that end both."""

    def __init__(
        self,
        sampler: Sampler,
        config: Config,
        listening: list[socket.socket],
        web_config: Path | None,
        systemd: Systemd,
    ) -> None:
        self._sampler = sampler
        self._listening = listening
        self._web_config = web_config
        self._log_level = config.log.level
        self._systemd = systemd
        self._exporter: Exporter | None = None
        self._start_exporter_at = 0.0
        self._is_ready = False
        wakeup, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._loop = Loop(sampler, config.period_ns, self._on_message, self._each_tick, wakeup)

    def run(self) -> None:
        """Until SIGTERM or SIGINT."""
        signal.set_wakeup_fd(self._woken.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._start_exporter()
        self._loop.run()
        self._systemd.stopping()
        log.info("ending")
        if self._exporter:
            self._loop.control = None
            self._exporter.end()
        self._sampler.close()

    def _on_signal(self, number: int, _: object) -> None:
        log.info("signal %s: ending", signal.Signals(number).name)
        self._loop.stop()

    def _start_exporter(self) -> None:
        self._exporter = Exporter(self._listening, self._web_config, self._log_level)
        self._loop.control = self._exporter.control

    def _on_message(self, message: bytes) -> None:
        if message == b"serving":
            places = ", ".join(_place(sock) for sock in self._listening)
            log.info("serving on %s", places)
            if not self._is_ready:
                self._is_ready = True
                self._systemd.ready(f"sampling; metrics on {places}")
        elif not message and self._exporter:
            self._exporter_ended(self._exporter)

    def _exporter_ended(self, exporter: Exporter) -> None:
        code = exporter.end()
        self._exporter, self._loop.control = None, None
        if not self._is_ready:  # it cannot start at all: its words are in the log
            raise HostError(f"exporter: ended with code {code} before it served anything")
        self._sampler.own_cost.exporter_restarts += 1
        self._start_exporter_at = time.monotonic() + EXPORTER_PAUSE
        log.error("exporter: ended with code %d; starting another", code)

    def _each_tick(self) -> None:
        self._systemd.alive()
        if not self._exporter and time.monotonic() >= self._start_exporter_at:
            self._start_exporter()


def _place(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _report_hooks(manifest: Manifest, strict: bool) -> None:
    missing = [hook for hook in manifest.hooks if not hook.attached]
    words = [f"{hook.program}: {hook.hook} ({hook.mechanism}): {hook.reason}" for hook in missing]
    if missing and strict:
        raise HostError("--strict: hooks are missing:\n" + "\n".join(words))
    for line in words:
        log.warning("hook missing: %s", line)
    for one in manifest.chosen:
        if one.mechanism and one.instead_of:
            log.info("%s: %s by %s, not by %s", one.program, one.what, one.mechanism, one.instead_of)
    log.info("attached %d of %d hooks", len(manifest.hooks) - len(missing), len(manifest.hooks))


def _drop_privileges(manifest: Manifest, fds: list[int]) -> None:
    """Keep what naming needs, and what reading maps needs only where the kernel asks for it."""
    keep = (NAMING | RESTARTING) & privileges.capabilities()
    needs_more = not _maps_readable_without_privileges(fds[0])
    if needs_more:
        kept = sorted(MAPS & privileges.capabilities())[:1]
        log.warning("this kernel (before 5.19) lets only %s read maps: the sampler keeps it", *kept)
        keep |= set(kept)
    privileges.keep_only(keep)


def _maps_readable_without_privileges(fd: int) -> bool:
    """Tried in a thread that has none: capabilities belong to threads."""
    results: list[bool] = []

    def try_it() -> None:
        privileges.keep_only(set())
        key, value = ctypes.c_uint32(0), ctypes.create_string_buffer(64)
        results.append(libbpf().bpf_map_lookup_elem(fd, ctypes.byref(key), value) == 0)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return bool(results and results[0])


def check(config: Config) -> int:
    """Say what would be attached with a (valid) configuration; 3 if a program cannot run here."""
    from lockd.load import doctor as host_doctor  # much that the daemon has no use for

    return host_doctor.check(load_settings(config))


def doctor() -> int:
    """Say what this host offers for every program; 3 if a program cannot run here."""
    from lockd.load import doctor as host_doctor

    return host_doctor.report()
