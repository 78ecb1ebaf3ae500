"""What is attached while a load runs: nothing, empty programs, lockd, or what its users would run instead."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.comparison import EVERY_CALL, FLOOR, LOCKD, UNTRACED
from bench.cost import children_of, cpu_seconds
from tests.support.bcc_headers import bcc_headers
from tests.support.lockd_process import lockd_or_reason

PROGRAMS = ("futex", "offcpu", "kernel_locks")
DEFAULTS: Mapping[str, Any] = MappingProxyType({})
NO_HOLDERS = {"profile": {"samples_per_second": 0}}
NO_WAIT_SAMPLES = {"profile": {"waits_per_second": 0}}
"""Two configurations: one without samples of holders, and one without samples of waits."""
LOCKTRACE_LIKE = Path(__file__).resolve().parent / "locktrace_like.bpf.c"
KPROBES = Path("/sys/bus/event_source/devices/kprobe")
START_SECONDS = 60.0
SETTLE_SECONDS = 1.0
"""Seconds to wait after a tool has said that it is attached. Some tools attach only then, or first look at
what was there before."""
REST_SECONDS, AT_REST = 30.0, 0.1
"""The most seconds to wait until a daemon is at rest: it takes less than this share of a processor."""
FUTEX_BPFTRACE = """
tracepoint:syscalls:sys_enter_futex { @since[tid] = nsecs; }
tracepoint:syscalls:sys_exit_futex /@since[tid]/ {
  @us[comm] = hist((nsecs - @since[tid]) / 1000); delete(@since[tid]); }
BEGIN { printf("attached\\n"); }
"""
OFFCPU_BPFTRACE = """
tracepoint:sched:sched_switch {
  if (args->prev_state) { @off[args->prev_pid] = nsecs; }
  if (@off[args->next_pid]) {
    @us[args->next_comm] = hist((nsecs - @off[args->next_pid]) / 1000); delete(@off[args->next_pid]); } }
BEGIN { printf("attached\\n"); }
"""


class NotHere(Exception):
    """This host cannot run the variant. The message says why."""


@dataclass(frozen=True)
class Variant:
    """What can be attached. `attached` returns a context in which it is, and raises NotHere."""

    name: str
    attached: Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def floor(mechanism: str = "auto", futex_mode: str = "blocked") -> Iterator[None]:
    """Attach programs that do nothing to the hooks that lockd would take here. Raises NotHere."""
    from lockd.kernel.btf import KernelTypes
    from lockd.load import programs as loading
    from lockd.load.choose import choices_for
    from lockd.load.host import Host

    host = Host(KernelTypes())
    opened: list[int] = []
    try:
        for choice in choices_for(settings(PROGRAMS, mechanism, futex_mode), host):
            if not choice.way:
                raise NotHere(choice.instead_of)
            for hook, missing in choice.hooks:
                if not missing:
                    btf_id = (
                        host.types.function(hook.hook) or 0 if hook.mechanism in ("fentry", "fexit") else 0
                    )
                    program = loading.load(loading.RETURN_0, "empty", hook.mechanism, btf_id)
                    opened += [program, loading.attach(program, hook.mechanism, hook.hook, host.tracefs)]
        yield
    finally:
        for fd in opened:
            os.close(fd)


def settings(
    programs: tuple[str, ...] = PROGRAMS, mechanism: str = "auto", futex_mode: str = "blocked"
) -> Any:
    """The settings of the loader that follow from config()."""
    from lockd.config.reader import read_text
    from lockd.config.schema import Config
    from lockd.service.start import load_settings

    asked = config(programs, mechanism, futex_mode)
    return load_settings(read_text(Config, json.dumps(asked), "bench"))


def config(
    programs: tuple[str, ...] = PROGRAMS, mechanism: str = "auto", futex_mode: str = "blocked",
    lock_mode: str = "contention", samples: Mapping[str, Any] = DEFAULTS,
) -> dict[str, Any]:  # fmt: skip
    """The default configuration with these programs only, by this mechanism only, with these modes of futex
    and kernel_locks, and with `samples`, further settings."""
    asked: dict[str, dict[str, object]] = {name: {"enabled": name in programs} for name in PROGRAMS}
    asked["futex"].update(mechanism=mechanism, mode=futex_mode)
    asked["kernel_locks"].update(mechanism=mechanism, mode=lock_mode)
    return {"programs": asked, **samples}


@contextlib.contextmanager
def lockd(
    programs: tuple[str, ...] = PROGRAMS, mechanism: str = "auto", futex_mode: str = "blocked",
    lock_mode: str = "contention", samples: Mapping[str, Any] = DEFAULTS,
) -> Iterator[None]:  # fmt: skip
    """Run a daemon with the configuration that config() returns. Raises NotHere."""
    asked = config(programs, mechanism, futex_mode, lock_mode, samples)
    with tempfile.TemporaryDirectory() as directory:
        daemon = lockd_or_reason(Path(directory), asked)
        if isinstance(daemon, str):
            raise NotHere(daemon)
        try:
            _wait_for_rest(daemon.process.pid)
            yield
        finally:
            daemon.stop()


def _wait_for_rest(daemon: int) -> None:
    """Wait until the daemon's processes do hardly anything, but not longer than REST_SECONDS.

    When the daemon is ready, the namer is still starting, and would share the processor with the load.
    """
    deadline = time.monotonic() + REST_SECONDS
    while time.monotonic() < deadline:
        before = _cpu_seconds(daemon)
        time.sleep(SETTLE_SECONDS)
        if _cpu_seconds(daemon) - before < AT_REST * SETTLE_SECONDS:
            return


def _cpu_seconds(daemon: int) -> float:
    return sum(cpu_seconds(pid) for pid in (daemon, *children_of(daemon)))


@contextlib.contextmanager
def locktrace_like() -> Iterator[None]:
    """Attach the programs of locktrace_like.bpf.c, which do what a locktrace does."""
    from bcc import BPF  # type: ignore[import-untyped,unused-ignore]

    from lockd.load.source import HEADERS

    os.environ["BCC_KERNEL_SOURCE"] = str(HEADERS)
    module = BPF(text=LOCKTRACE_LIKE.read_text())
    try:
        yield
    finally:
        module.cleanup()


@contextlib.contextmanager
def command(*words: str, says: str) -> Iterator[None]:
    """Run a tool that traces until SIGINT. It is attached once it has printed a line with `says`. Tools of
    bcc find the kernel headers that they need, whether the host has them or not. Raises NotHere."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as out:
        environment = {**os.environ, **bcc_headers(Path(directory)), "PYTHONUNBUFFERED": "1"}
        try:
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment)
        except FileNotFoundError as error:
            raise NotHere(f"{words[0]} is not installed") from error
        try:
            deadline = time.monotonic() + START_SECONDS
            while says not in (text := _text(out)):
                if process.poll() is not None:
                    raise NotHere(f"{words[0]} ended with code {process.returncode}: {text.strip()[-200:]}")
                if time.monotonic() > deadline:
                    raise NotHere(f"{words[0]} did not attach in {START_SECONDS:g} s: {text.strip()[-200:]}")
                time.sleep(0.1)
            time.sleep(SETTLE_SECONDS)
            if process.poll() is not None:
                raise NotHere(f"{words[0]} ended with code {process.returncode}: {_text(out).strip()[-200:]}")
            yield
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _text(file: Any) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


@contextlib.contextmanager
def bcc(name: str) -> Iterator[None]:
    """Run one of bcc's tools, by its name in Debian's package. Raises NotHere."""
    if not KPROBES.exists():
        raise NotHere("this kernel has no kprobes, which bcc's tools need")
    with command(f"{name}-bpfcc", says="Tracing"):
        yield


def _bcc(name: str) -> Variant:
    return Variant(f"bcc {name}", lambda: bcc(name))


def _bpftrace(name: str, script: str) -> Variant:
    return Variant(f"bpftrace: {name}", lambda: command("bpftrace", "-e", script, says="attached"))


VARIANTS = (
    Variant(UNTRACED, contextlib.nullcontext),
    Variant(FLOOR, floor),
    Variant(LOCKD, lockd),
    Variant(f"{LOCKD}, no holders", lambda: lockd(samples=NO_HOLDERS)),
    Variant(f"{LOCKD}, no wait samples", lambda: lockd(samples=NO_WAIT_SAMPLES)),
    Variant(FLOOR + EVERY_CALL, lambda: floor(futex_mode="calls")),
    Variant(LOCKD + EVERY_CALL, lambda: lockd(futex_mode="calls")),
    *(Variant(f"lockd: {name}", lambda name=name: lockd((name,))) for name in PROGRAMS),
    Variant("locktrace-like", locktrace_like),
    _bpftrace("futex", FUTEX_BPFTRACE),
    _bpftrace("off-CPU", OFFCPU_BPFTRACE),
    _bcc("offcputime"),
    _bcc("offwaketime"),
    _bcc("klockstat"),
)
"""The variants for every kernel. UNTRACED, measured against itself, shows what chance makes of a ratio."""
BY_MECHANISM = (
    *(
        Variant(
            f"{name}{EVERY_CALL} by {mechanism}",
            lambda what=what, mechanism=mechanism: what(mechanism=mechanism, futex_mode="calls"),
        )
        for mechanism in ("fentry", "kprobe")
        for name, what in ((FLOOR, floor), (LOCKD, lockd))
    ),
    Variant("lockd: kernel_locks, all", lambda: lockd(("kernel_locks",), lock_mode="all")),
)
"""Further variants, for kernels that have these mechanisms."""
