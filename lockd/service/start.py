"""The start of the daemon: its processes side by side, then without the privileges that loading took."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from lockd import logs
from lockd.config.schema import Config, Program
from lockd.errors import HostError, LockdError
from lockd.kernel.libbpf import libbpf
from lockd.kernel.manifest import Manifest
from lockd.load.child import Loader
from lockd.load.settings import LoadSettings
from lockd.process import memory, privileges
from lockd.service.exporter import Exporter, check_web_config, listen
from lockd.service.store import Store, key_of
from lockd.service.systemd import Systemd

if TYPE_CHECKING:
    from lockd.sample.sampler import Sampler

log = logging.getLogger(__name__)

NAMING = {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG"}
"""To read other processes' maps, cgroups by id, and kernel symbols."""
KILLING = {"CAP_KILL"}
"""To end an exporter and a namer, which are other users'."""
RESTARTING = {"CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"}
"""To start others, which become other users then: this process itself never uses them."""
MAPS = {"CAP_BPF", "CAP_SYS_ADMIN"}
"""To read maps before 5.19 (c8644cd0efe7): one of them, whichever there is."""
LONGEST = 2**63 - 1
LARGE = 1 << 20
"""Bytes. What a tick allocates is seldom so large."""


def run(config: Config, read: Callable[[], Config], strict: bool) -> int:
    """The daemon; returns 0 after SIGTERM or SIGINT. Raises LockdError if it cannot start.

    `read` gives the configuration as its file is later on.
    """
    logs.setup(config.log.level, process="sampler")
    memory.return_freed_memory(LARGE)
    privileges.no_new_privileges()  # as in the unit
    systemd = Systemd()
    listening = listen(list(config.web.listen))
    settings = load_settings(config)
    store = Store(systemd, key_of(settings))
    web_config = config.web.config_file
    web_kept = os.memfd_create("lockd-web-kept") if web_config else None

    def start_exporter(now: Config) -> Exporter:
        return Exporter(listening, web_config, now.log.level, now.budget.requests, web_kept)

    exporter: Exporter | None = None
    try:
        adopted = store.adopt()
        if not adopted:
            systemd.status("compiling and attaching the BPF programs")
            loader = Loader(settings)
        exporter = start_exporter(config)
        # While those two work: numpy is half of this process's start.
        from lockd.sample.sampler import Sampler
        from lockd.sample.saved_state import Saved
        from lockd.service.daemon import Daemon, sampler_settings

        manifest, fds = adopted or loader.result()
        if not adopted:
            store.keep(manifest, fds)
        _report_hooks(manifest, strict)
        _drop_privileges(manifest, fds)
        systemd.status("starting to sample")
        begin = functools.partial(Sampler, manifest, fds, sampler_settings(config))
        sampler = _going_on(begin, store) if adopted else begin(saved=Saved(store.counted()))
    except BaseException as error:
        if exporter:
            exporter.end()
        if isinstance(error, (OSError, MemoryError)):  # of processes, descriptors or memory
            raise LockdError(f"cannot start: {error or type(error).__name__}") from error
        raise
    Daemon(sampler, config, read, listening, start_exporter, systemd, store).run(exporter)
    return 0


def _going_on(begin: Callable[..., Sampler], store: Store) -> Sampler:
    """A sampler that goes on where the last one was, or from zero if what that one left makes no sense."""
    try:
        return _taken_over(begin, store)
    except Exception as error:  # whichever comes of another version's file
        words = str(error) if isinstance(error, ValueError) else repr(error)
        log.warning("what the last start has counted is not used: %s; all counts begin at zero", words)
        store.forget_counted()
        return _taken_over(begin, store)


def _taken_over(begin: Callable[..., Sampler], store: Store) -> Sampler:
    from lockd.sample.saved_state import Saved

    sampler = begin(saved=Saved(store.counted()))
    sampler.take_over()
    return sampler


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
    has = privileges.capabilities()
    keep = (NAMING | KILLING) & has
    needs_more = not _maps_readable_without_privileges(fds[0])
    if needs_more:
        kept = sorted(MAPS & has)[:1]
        log.warning("this kernel (before 5.19) lets only %s read maps: the sampler keeps it", *kept)
        keep |= set(kept)
    privileges.keep_only(keep, dormant=RESTARTING & has)


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


def check(config: Config, is_quiet: bool) -> int:
    """Say what would be attached with a (valid) configuration; 3 if a program cannot run here.

    If `is_quiet` nothing is said, and the host is not looked at. Raises ConfigError if the web configuration
    is wrong.
    """
    if config.web.config_file:
        check_web_config(config.web.config_file)
    if is_quiet:
        return 0
    from lockd.load import doctor as host_doctor  # much that the daemon has no use for

    return host_doctor.check(load_settings(config))


def doctor() -> int:
    """Say what this host offers for every program; 3 if a program cannot run here."""
    from lockd.load import doctor as host_doctor

    return host_doctor.report()
