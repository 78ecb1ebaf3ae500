"""The start of the daemon, and the commands `check` and `doctor`.

Loader, exporter and this process, which becomes the sampler, start side by side. Once the programs are
loaded, this process gives up the privileges that only loading needs.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockd import logs
from lockd.config.schema import Config, Program
from lockd.errors import HostError, LockdError
from lockd.kernel.libbpf import libbpf
from lockd.kernel.manifest import Manifest
from lockd.load.child import Loader
from lockd.load.settings import SYSFS, LoadSettings, possible_cpus
from lockd.process import memory, privileges
from lockd.service.exporter import Exporter, check_web_config, listen
from lockd.service.store import Store, key_of
from lockd.service.systemd import Systemd

if TYPE_CHECKING:
    from lockd.sample.sampler import Sampler

log = logging.getLogger(__name__)

NAMING = {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG"}
"""Capabilities to read other processes' memory maps, cgroups by id, and kernel symbols."""
KILLING = {"CAP_KILL"}
"""The capability to end exporter and namer, which run as other users."""
RESTARTING = {"CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"}
"""Capabilities to start another exporter or namer, which becomes another user. This process itself never uses
them."""
MAPS = {"CAP_BPF", "CAP_SYS_ADMIN"}
"""Capabilities to read BPF maps before Linux 5.19 (c8644cd0efe7); either of them is enough."""
LONGEST = 2**63 - 1
"""The nanoseconds that stand for a filter.max_block without a limit."""
LARGE = 1 << 20
"""Bytes of the smallest allocation that is returned to the kernel when it is freed. A tick seldom allocates
so much at once."""


def run(config: Config, read: Callable[[], Config], strict: bool) -> int:
    """Run the daemon. Returns 0 after SIGTERM or SIGINT. Raises LockdError if it cannot start.

    `read` reads the configuration again for a reload. With `strict`, a missing hook is an error.
    """
    logs.setup(config.log.level, process="sampler")
    memory.return_freed_memory(LARGE)
    privileges.no_new_privileges()  # as NoNewPrivileges= in the unit does
    systemd = Systemd()
    listening = listen(list(config.web.listen))
    settings = load_settings(config)
    store = Store(systemd, key_of(asked_for(config, settings)))
    web_config = config.web.config_file
    web_kept = memory.create_file("lockd-web-kept") if web_config else None

    def start_exporter(now: Config) -> Exporter:
        return Exporter(listening, web_config, now.log.level, now.budget.requests, web_kept)

    exporter: Exporter | None = None
    try:
        adopted = store.adopt()
        if not adopted:
            systemd.set_status("compiling and attaching the BPF programs")
            loader = Loader(settings)
        exporter = start_exporter(config)
        # The import of numpy takes half of this process's start. Loader and exporter start at the same time.
        from lockd.sample.sampler import Sampler
        from lockd.sample.saved_state import SavedState
        from lockd.service.daemon import Daemon, sampler_settings

        manifest, fds = adopted or loader.result()
        if not adopted:
            store.keep(manifest, fds)
        _report_hooks(manifest, strict)
        _drop_privileges(fds)
        systemd.set_status("starting to sample")
        begin = functools.partial(Sampler, manifest, fds, sampler_settings(config))
        sampler = _resumed(begin, store) if adopted else begin(saved=SavedState(store.counts_file()))
    except BaseException as error:
        if exporter:
            exporter.end()
        if isinstance(error, (OSError, MemoryError)):  # no processes, descriptors or memory left
            raise LockdError(f"cannot start: {error or type(error).__name__}") from error
        raise
    Daemon(sampler, config, read, listening, start_exporter, systemd, store).run(exporter)
    return 0


def _resumed(begin: Callable[..., Sampler], store: Store) -> Sampler:
    """A sampler with the counts of the last start, or with none if those make no sense.

    Raises OSError, MemoryError or LockdError if the host lacks a resource at this moment. Then the counts
    stay for the next start.
    """
    try:
        return _with_counts(begin, store)
    except (OSError, MemoryError, LockdError):
        raise
    except Exception as error:  # counts of another version of lockd can cause any exception
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        log.warning("what the last start has counted is not used: %s; all counts begin at zero", reason)
        store.discard_counts()
        return _with_counts(begin, store)


def _with_counts(begin: Callable[..., Sampler], store: Store) -> Sampler:
    from lockd.sample.saved_state import SavedState

    sampler = begin(saved=SavedState(store.counts_file()))
    sampler.take_over()
    return sampler


def load_settings(config: Config, sysfs: Path = SYSFS, memory_bytes: int | None = None) -> LoadSettings:
    """The part of the configuration that the loader needs.

    The sizes of maps fit a machine with the processors that the directory `sysfs` lists, and with
    `memory_bytes` of memory, by default as much as this machine has.
    """
    if memory_bytes is None:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpus = possible_cpus(sysfs)
    maps = config.maps.for_machine(cpus, memory_bytes)
    wanted = config.programs
    programs: dict[str, Program] = {
        "futex": wanted.futex,
        "offcpu": wanted.offcpu,
        "kernel_locks": wanted.kernel_locks,
    }
    enabled = {name: program for name, program in programs.items() if program.enabled}
    longest = config.filter.max_block_ns
    return LoadSettings(
        programs=tuple(enabled),
        entries=maps.entries,
        threads=maps.threads,
        stacks=maps.stacks,
        min_block_ns=config.filter.min_block_ns,
        max_block_ns=LONGEST if longest is None else longest,
        lock_mode=wanted.kernel_locks.mode,
        futex_mode=wanted.futex.mode,
        mechanisms=tuple((name, program.mechanism) for name, program in enabled.items()),
        has_holders=config.profile.samples_per_second > 0,
        has_wait_samples=config.profile.waits_per_second > 0,
        cpus=cpus,
    )


def asked_for(config: Config, settings: LoadSettings) -> LoadSettings:
    """The `settings` with the sizes that the configuration gives, for the condition of adoption (key_of()).

    A size that is `auto` follows the memory of the machine, which can change while lockd runs, as that of a
    virtual machine does. The maps of the last start are still as good then.
    """
    return replace(settings, entries=config.maps.entries, threads=config.maps.threads)


def _report_hooks(manifest: Manifest, strict: bool) -> None:
    missing = [hook for hook in manifest.hooks if not hook.attached]
    lines = [f"{hook.program}: {hook.hook} ({hook.mechanism}): {hook.reason}" for hook in missing]
    if missing and strict:
        raise HostError("--strict: hooks are missing:\n" + "\n".join(lines))
    for line in lines:
        log.warning("hook missing: %s", line)
    for way in manifest.chosen:
        if way.mechanism and way.instead_of:
            log.info("%s: %s by %s, not by %s", way.program, way.what, way.mechanism, way.instead_of)
    log.info("attached %d of %d hooks", len(manifest.hooks) - len(missing), len(manifest.hooks))


def _drop_privileges(fds: list[int]) -> None:
    """Drop all capabilities but NAMING, KILLING, RESTARTING, and one of MAPS if this kernel demands it.

    The first of `fds` is a map, with which this is tried.
    """
    has = privileges.capabilities()
    keep = (NAMING | KILLING) & has
    needs_more = not _maps_readable_without_privileges(fds[0])
    if needs_more:
        kept = sorted(MAPS & has)[:1]
        needed = " or ".join(kept) or "a capability that lockd lacks"
        log.warning("this kernel (before 5.19) lets only %s read maps: the sampler keeps it", needed)
        keep |= set(kept)
    # If this process runs as root, the namer gets its capabilities by execve(). Otherwise it gets only the
    # inherited ones.
    inherited = () if os.geteuid() == 0 else keep & NAMING
    privileges.keep_only(keep, dormant=RESTARTING & has, inherited=inherited)


def _maps_readable_without_privileges(fd: int) -> bool:
    """Whether the map `fd` can be read without capabilities. As capabilities belong to threads, a new thread
    drops all of its own and tries it."""
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
    """Print what lockd would attach with this configuration. Returns 3 if a program cannot run here, else 0.

    With `is_quiet` nothing is printed, and the host is not examined. Raises ConfigError if the web
    configuration is wrong.
    """
    if config.web.config_file:
        check_web_config(config.web.config_file)
    if is_quiet:
        return 0
    from lockd.load import doctor as host_doctor  # imports much that the daemon does not need

    return host_doctor.check(load_settings(config))


def doctor() -> int:
    """Print what this host offers for every program. Returns 3 if a program cannot run here, else 0."""
    from lockd.load import doctor as host_doctor

    return host_doctor.report()
