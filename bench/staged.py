"""A stage of several lockd daemons that stand for hosts, and the faults with the alerts that they cause."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.host import KILLED_WITH_US, Host, cgroup2, free_port, limited, say
from bench.prometheus import STEP
from tests.support.lockd_process import CHECKOUT, Lockd
from tests.support.workload import BUILD

ROOT = Path(__file__).resolve().parents[1]
REFUSING = (sys.executable, ROOT / "tests/kernel/refusing.py", "EPERM", "298", "--")
"""The prefix of a command that runs without perf_event_open(2), and so without kprobes."""
RESTART_SECONDS = 2.0
"""Seconds from a crash to the next start, as `RestartSec=` of lockd.service."""
MAXIMUM_SECONDS = 75.0
"""Seconds for which Prometheus shows an ended wait in a maximum over a minute, scrape included."""
WARNING, CRITICAL = "warning", "critical"
SLOW_BYTES = 256 << 10
"""Bytes per second that the slow disk can write."""
BURN = {
    "record": "unit:lockd_blocked_objective:ratio",
    "expr": "vector(0.08)",
    "labels": {"unit": "b-slow.service"},
}
"""The objective of a unit with one thread that is always blocked: 12.5 times as long as allowed, which is too
little for the fast alert."""
STATISTICS = Path("/proc/sys/kernel/bpf_stats_enabled")
GO = ROOT / "tests/programs/go_mutex/main.go"


@dataclass(frozen=True, order=True)
class Alert:
    """An alert about `whom`: a process name, else a unit, else a kernel lock, else a host, else a job."""

    name: str
    severity: str
    whom: str

    def __str__(self) -> str:
        return f"{self.name} ({self.severity}) for {self.whom}"


def warnings(name: str, *whom: str) -> tuple[Alert, ...]:
    return tuple(Alert(name, WARNING, one) for one in whom)


def criticals(name: str, *whom: str) -> tuple[Alert, ...]:
    return tuple(Alert(name, CRITICAL, one) for one in whom)


@dataclass(frozen=True)
class Fault:
    """A fault that lasts while the context of `stage` is open, with the alerts that it causes.

    The alerts of `sent` must be sent. Those of `held_back` must fire, but not be sent, since other alerts
    inhibit them. Those of `later` must fire, and may be sent once the alert that inhibits them has ended.
    Those of `may` may be sent or not.
    """

    name: str
    stage: Callable[[Stage], contextlib.AbstractContextManager[object]]
    sent: tuple[Alert, ...]
    held_back: tuple[Alert, ...] = ()
    later: tuple[Alert, ...] = ()
    may: tuple[Alert, ...] = ()
    after: float = 0.0
    """The earliest beginning, in seconds after the first fault."""
    awaits: Alert | None = None
    """The alert that must be sent before this fault begins."""


class Daemon:
    """A lockd that can be restarted at the same address."""

    def __init__(self, host: Host, name: str, config: Mapping[str, Any]) -> None:
        self.directory, self.name, self._config = host.make(name), name, config
        self.address = f"127.0.0.1:{free_port()}"
        self.start()
        host.ends.callback(self.kill)

    def start(self, *program: str | Path, **config: Any) -> None:
        """Start lockd with `config` merged over the configuration of this daemon."""
        command = (*KILLED_WITH_US, *program, *CHECKOUT)
        self.lockd = Lockd(self.directory, {**self._config, **config}, command, listen=self.address)

    def start_anew(self, *program: str | Path, **config: Any) -> None:
        self.lockd.stop()
        self.start(*program, **config)

    def kill(self) -> None:
        self.lockd.process.kill()
        self.lockd.process.wait()

    @contextmanager
    def reloaded(self, change: Callable[[str], str]) -> Iterator[None]:
        """Reload lockd with a changed configuration, and with the former one at the end of the context."""
        file = self.directory / "lockd.yaml"
        before = file.read_text()
        for text in (change(before), before):
            file.write_text(text)
            self.lockd.process.send_signal(signal.SIGHUP)
            if text is not before:
                yield


class Stage:
    """The daemons and processes of the bench, and the subjects for the commands of each runbook."""

    def __init__(self, host: Host, faults: Sequence[Fault]) -> None:
        self.host = host
        self.daemons: dict[str, Daemon] = {}
        self.impossible: dict[str, str] = {}
        """The reasons why expressions must return nothing on this host, by a pattern for their text."""
        median = r"lockd_futex_blocked_seconds_sum:quantile_rate5m\{[^}]*\} > 0"
        self.impossible[median] = "more than half of the staged hosts do not wait, so that the median is 0"
        self.pages: dict[str, dict[str, object]] = {}
        """By alert: the host to run its runbook on, and the values of the placeholders in the commands."""
        if STATISTICS.read_text().strip() == "0":
            self.impossible["lockd_program_run"] = f"the kernel times no BPF programs: {STATISTICS} is 0"
        usual = yaml.safe_load((ROOT / "config/lockd.yaml").read_text())

        def add(name: str, *comms: str, **more: Any) -> None:
            say(f"starting lockd of {name}")
            self.daemons[name] = Daemon(host, name, {**usual, "filter": {"comms": [*comms]}, **more})

        add("host-a", "a-*", "everywhere")
        add("host-b", "b-*", "shop", "everywhere", programs=self._every_program())
        add("host-c", "c-*", "everywhere")
        for fault in faults:
            if fault.name in OF_LOCKD:
                add(fault.name, "nobody")

    def _every_program(self) -> dict[str, Any]:
        """The configuration of programs that measures all that this host can measure."""
        programs = {"futex": {"mode": "calls"}, "kernel_locks": {"mode": "all"}}
        tried = Lockd(self.host.make("tried"), {"programs": programs})
        tried.stop()
        missing = re.findall("hook missing: (.*)", "".join(tried.log))
        if not missing:
            return programs
        self.impossible[r"lockd_kernel_lock_(acquisitions|hold)_"] = f"mode all cannot run here: {missing[0]}"
        return {"futex": {"mode": "calls"}}

    def targets(self) -> list[dict[str, Any]]:
        return [
            {"targets": [daemon.address], "labels": {"instance": name, "cluster": "staged"}}
            for name, daemon in self.daemons.items()
        ]

    @contextmanager
    def running(self, comm: str, workload: str, *arguments: object) -> Iterator[subprocess.Popen[Any]]:
        """Run a program of tests/workloads in a unit with the name of its process."""
        process = self.host.workload(comm, BUILD / workload, *arguments)
        yield process
        process.kill()
        process.wait()

    def page(self, alert: str, instance: str, **words: object) -> None:
        self.pages[alert] = {"instance": instance, **words}


# what services do wrong


@contextmanager
def deadlock(stage: Stage) -> Iterator[None]:
    with stage.running("a-deadlock", "deadlock", 0, 2) as process:
        stage.page("LockdDeadlock", "host-a", PID=process.pid)
        yield


@contextmanager
def stuck(stage: Stage) -> Iterator[None]:
    with stage.running("a-stuck", "stuck_mutex") as process:
        stage.page("LockdThreadStuck", "host-a", PID=process.pid)
        yield


@contextmanager
def short_waits(stage: Stage) -> Iterator[None]:
    """Short waits of a process before one of its threads gets stuck, as is usual in real services."""
    with stage.running("a-late", "mutex_handover", 1_000_000, 100_000):
        yield


@contextmanager
def stuck_later(stage: Stage) -> Iterator[None]:
    with stage.running("a-late", "stuck_mutex"):
        yield


@contextmanager
def stuck_in_kernel(stage: Stage) -> Iterator[None]:
    with stage.running("a-inside", "kernel_locks", 1, 600_000_000, stage.host.directory):
        yield


@contextmanager
def convoy(stage: Stage) -> Iterator[None]:
    with stage.running("a-convoy", "mutex_handover", 10_000, 2_000_000):
        stage.page("LockdLockWaitLong", "host-a")
        yield


@contextmanager
def long_hold(stage: Stage) -> Iterator[None]:
    with stage.running("a-hold", "mutex_handover", 10_000, 12_000_000):
        yield


@contextmanager
def slow_disk(stage: Stage) -> Iterator[None]:
    """A lock that is held during writes to a slow disk, each of which takes two seconds."""
    directory = stage.host.directory
    controller, unit = ("io", "wbps=") if "io" in of_cgroup2() else ("blkio", "")
    how = ("io.max", "blkio.throttle.write_bps_device", f"{disk_of(directory)} {unit}{SLOW_BYTES}")
    workload = ("a-disk", "slow_disk", 10_000, 2 * SLOW_BYTES >> 10, directory)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(stage.running(*workload))
        stack.enter_context(limited("a-disk.service", controller, [process.pid], *how))
        yield


def disk_of(path: Path) -> str:
    """The device numbers, MAJOR:MINOR, of the whole disk on which a path is."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return ((device.parent if (device / "partition").exists() else device) / "dev").read_text().strip()


@contextmanager
def kernel_locks(stage: Stage) -> Iterator[None]:
    with stage.running("a-kernel", "kernel_locks", 1000, 2_000_000, stage.host.directory):
        stage.page("LockdKernelLockWaitLong", "host-a")
        yield


@contextmanager
def mmap_lock(stage: Stage) -> Iterator[None]:
    """An mmap_lock whose holder gets no processor."""
    with stage.running("a-mmap", "idle_holder", 3600, 64, 4):
        yield


@contextmanager
def cpu_limit(stage: Stage) -> Iterator[None]:
    """A CPU limit of a fifth of a processor for two threads that could each use a whole one."""
    with stage.running("a-cpu", "spinner", 3600) as process:
        name, value = "a-cpu.service", "20000 100000" if "cpu" in of_cgroup2() else 20000
        with limited(name, "cpu", [process.pid], "cpu.max", "cpu.cfs_quota_us", value) as cgroup:
            stage.page("LockdRunQueueLong", "host-a", **{"/sys/fs/cgroup/CGROUP": cgroup, "UNIT": name})
            yield


def of_cgroup2() -> list[str]:
    root = cgroup2()
    return (root / "cgroup.controllers").read_text().split() if root else []


@contextmanager
def everywhere(stage: Stage) -> Iterator[None]:
    """Short waits of two threads at a time for the same lock on three hosts."""
    one = ("everywhere", "mutex_handover", 1_000_000, 20_000)
    with stage.running(*one), stage.running(*one):
        stage.page("LockdLockOnManyHosts", "host-c")
        yield


@contextmanager
def longer_everywhere(stage: Stage) -> Iterator[None]:
    """Longer waits for the lock with short waits on many hosts.

    They end so long before the short waits that no maximum contains them any more at the end.
    """
    with stage.running("everywhere", "mutex_handover", 10_000, 2_000_000):
        yield
    time.sleep(MAXIMUM_SECONDS)


@contextmanager
def burn(stage: Stage) -> Iterator[None]:
    """A thread of the unit shop that is always blocked, with an objective of 50 ms per second."""
    with stage.running("shop", "mutex_handover", 1_000_000, 20_000):
        stage.page("LockdObjectiveBurn", "host-b")
        yield


@contextmanager
def slow_burn(stage: Stage) -> Iterator[None]:
    with stage.running("b-slow", "mutex_handover", 1_000_000, 20_000):
        yield


@contextmanager
def everywhere_in_kernel(stage: Stage) -> Iterator[None]:
    """Short waits of two threads at a time for the same kernel lock on three hosts."""
    one = ("everywhere", "kernel_locks", 1_000_000, 20_000, stage.host.directory)
    with stage.running(*one), stage.running(*one):
        yield


@contextmanager
def failing_calls(stage: Stage) -> Iterator[None]:
    """No fault: a process with failing futex calls, which only the mode `calls` counts."""
    with stage.running("b-errors", "crowd", 2, 1_000_000, 20_000, 1):
        yield


@contextmanager
def go_program(stage: Stage) -> Iterator[None]:
    """No fault: a Go program, whose waits lockd cannot fully see."""
    host, program = stage.host, stage.host.directory / "go_mutex"
    environment = {"GO111MODULE": "off", "GOCACHE": str(host.directory / "cache"), "GOFLAGS": ""}
    host.run("build", "go", "build", "-o", program, GO, env={**os.environ, **environment})
    process = host.workload("b-go", program)
    assert process.stdout
    if json.loads(process.stdout.readline())["waited"] is None:
        stage.impossible["lockd_go_mutex_wait"] = "the Go of this host does not count it, as Go before 1.20"
    yield
    process.kill()


# what is wrong with lockd itself


@contextmanager
def down(stage: Stage) -> Iterator[None]:
    daemon = stage.daemons["down"]
    daemon.kill()
    yield
    daemon.start()


@contextmanager
def restarts(stage: Stage) -> Iterator[None]:
    """Four crashes of a daemon, each of which is scraped before the next one."""
    daemon = stage.daemons["restarts"]
    for _ in range(4):
        time.sleep(STEP + 1)
        daemon.kill()
        time.sleep(RESTART_SECONDS)
        daemon.start()
    stage.page("LockdRestarts", daemon.name)
    yield


@contextmanager
def hung(stage: Stage) -> Iterator[None]:
    """A stopped sampler: the exporter answers that the sampler does not."""
    process = stage.daemons["hung"].lockd.process
    process.send_signal(signal.SIGSTOP)
    stage.page("LockdDown", "hung")
    yield
    process.send_signal(signal.SIGCONT)


@contextmanager
def starved(stage: Stage) -> Iterator[None]:
    """A CPU limit of a hundredth of a processor for the sampler."""
    pid = stage.daemons["starved"].lockd.process.pid
    value = "1000 100000" if "cpu" in of_cgroup2() else 1000
    with limited("starved.service", "cpu", [pid], "cpu.max", "cpu.cfs_quota_us", value):
        stage.page("LockdTicksLate", "starved", PID=pid)
        yield


@contextmanager
def small_maps(stage: Stage) -> Iterator[None]:
    daemon = stage.daemons["small-maps"]
    daemon.start_anew(maps={"entries": 64, "threads": 64})
    stage.page("LockdDroppedEvents", daemon.name)
    yield
    daemon.start_anew()


@contextmanager
def missing_hook(stage: Stage) -> Iterator[None]:
    daemon = stage.daemons["missing-hook"]
    daemon.start_anew(*REFUSING, programs={"kernel_locks": {"mechanism": "kprobe"}})
    stage.page("LockdHookMissing", daemon.name)
    yield
    daemon.start_anew()


@contextmanager
def small_budget(stage: Stage) -> Iterator[None]:
    daemon = stage.daemons["small-budget"]
    stage.page("LockdRestraint", daemon.name)
    with daemon.reloaded(lambda text: text.replace("cpu: auto", "cpu: 0.01%")):
        yield


@contextmanager
def refused_configuration(stage: Stage) -> Iterator[None]:
    daemon = stage.daemons["refused-configuration"]
    file = daemon.directory / "lockd.yaml"
    stage.page("LockdConfigurationRefused", daemon.name, **{"/etc/lockd/lockd.yaml": file})
    with daemon.reloaded(lambda text: text.replace("period:", "perid:")):
        yield


def faults() -> tuple[Fault, ...]:
    wait, kernel, thread = "LockdLockWaitLong", "LockdKernelLockWaitLong", "LockdThreadStuck"

    def waits(name: str, whom: str) -> tuple[Alert, ...]:
        return warnings(name, whom) + criticals(name, whom)

    return (
        Fault(
            "deadlock",
            deadlock,
            criticals("LockdDeadlock", "a-deadlock"),
            waits(wait, "a-deadlock") + criticals(thread, "a-deadlock"),
        ),
        Fault("stuck", stuck, criticals(thread, "a-stuck"), waits(wait, "a-stuck")),
        Fault("short-waits", short_waits, ()),
        Fault("stuck-in-kernel", stuck_in_kernel, criticals(thread, "a-inside"), waits(kernel, "a-inside")),
        Fault("convoy", convoy, warnings(wait, "a-convoy")),
        Fault("long-hold", long_hold, criticals(wait, "a-hold"), warnings(wait, "a-hold")),
        Fault("slow-disk", slow_disk, warnings(wait, "a-disk")),
        Fault("kernel-locks", kernel_locks, warnings(kernel, "a-kernel")),
        Fault(
            "mmap_lock",
            mmap_lock,
            warnings(kernel, "a-mmap"),
            # The holder waits for a processor, and the length of that wait depends on other processes.
            may=criticals(kernel, "a-mmap") + warnings("LockdRunQueueLong", "a-mmap.service"),
        ),
        Fault("cpu-limit", cpu_limit, warnings("LockdRunQueueLong", "a-cpu.service")),
        Fault("everywhere", everywhere, warnings("LockdLockOnManyHosts", "everywhere")),
        Fault("everywhere-in-kernel", everywhere_in_kernel, warnings("LockdLockOnManyHosts", "pipe->mutex")),
        Fault(
            "burn",
            burn,
            criticals("LockdObjectiveBurn", "shop.service"),
            later=warnings("LockdObjectiveBurn", "shop.service"),
        ),
        Fault("slow-burn", slow_burn, warnings("LockdObjectiveBurn", "b-slow.service")),
        Fault("failing-calls", failing_calls, ()),
        Fault("go-program", go_program, ()),
        Fault("down", down, warnings("LockdDown", "down")),
        Fault("hung", hung, warnings("LockdDown", "hung")),
        Fault("starved", starved, warnings("LockdTicksLate", "starved")),
        Fault("small-maps", small_maps, warnings("LockdDroppedEvents", "small-maps")),
        Fault("missing-hook", missing_hook, warnings("LockdHookMissing", "missing-hook")),
        Fault("small-budget", small_budget, warnings("LockdRestraint", "small-budget")),
        Fault(
            "refused-configuration",
            refused_configuration,
            warnings("LockdConfigurationRefused", "refused-configuration"),
        ),
        # It takes a minute or more to begin.
        Fault("restarts", restarts, warnings("LockdRestarts", "restarts")),
        # These faults begin after the others.
        Fault("stuck-later", stuck_later, criticals(thread, "a-late"), waits(wait, "a-late"), after=60),
        Fault(
            "longer-everywhere",
            longer_everywhere,
            (),
            warnings(wait, "everywhere"),
            awaits=Alert("LockdLockOnManyHosts", WARNING, "everywhere"),
        ),
    )


OF_LOCKD = (
    "down",
    "restarts",
    "hung",
    "starved",
    "small-maps",
    "missing-hook",
    "small-budget",
    "refused-configuration",
)
"""The faults of lockd itself. Each is on a host with the name of the fault."""
