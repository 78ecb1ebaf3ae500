"""Run lockd under churn with a fault every minute, and check that it recovers and counts correctly.

`sudo make faults` writes bench/build/faults.json and .md, and exits with 1 if something does not hold.

The daemon's descriptors are kept as systemd keeps them (tests/support/descriptor_store.py), and it is started
again when it ends, so that a whole run is one long service. Workloads (tests/workloads) come and go all the
time, and each counts its own waits and wakes.

After each fault everything must run again. The processes that the fault is about must have been replaced, and
no others. What lockd has counted of the workloads so far must be what they did. Two sorts of events may be
missing: those that lockd reports as dropped, and those of one sampling period if lockd was killed while it
drained the kernel's maps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench import results
from bench.cost import memory, pids_of
from bench.host import Host, cgroup2, end, get, hierarchy, limited, remove, say
from tests.support.descriptor_store import DescriptorStore
from tests.support.lockd_process import Lockd, Metrics
from tests.support.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = ("sampler", "namer", "exporter")
CONFIG = {
    "maps": {"entries": 65_536, "threads": 32_768},
    "series": {"max": 50_000},
    "programs": {"futex": {"mode": "calls"}},
}
"""The mode `calls` counts every futex call of a workload, so that all calls can be compared. The maps are so
large that what happens while the sampler stands still for some seconds is counted by process. `other` would
mix it with the events of other processes. The series are enough for all short processes of a busy host."""
SCRAPE_SECONDS, LOOK_SECONDS = 5.0, 15.0
PAUSE_SECONDS = 0.3
"""The pause of a workload between one run and the next."""
FAULT_SECONDS = 8.0
"""The duration of a fault that ends by itself."""
WHOLE_SECONDS = 100.0
"""The most seconds from the end of a fault until all is as before. lockd notices a process that hangs after
30 s, or after a minute if the process has just been started."""
FREED_SECONDS = 30.0
"""The most seconds until the kernel has freed programs and maps, which it does after grace periods."""
LEAST_SECONDS = 2.0
"""The least seconds without a fault, which follow a fault that takes longer than the time between faults."""
MOST_GROWN = {"MB": 0.1, "descriptors": 0.0, "threads": 0.0, "BPF objects": 0.0}
"""The largest growth that counts as flat: from the median of the first half of the run to that of the second
half, as a share."""
FILES_GROWN = 0.25
"""The same for the namer's descriptors, most of which are of files that processes of the host have mapped."""
JUDGED_MINUTES = 20.0
"""The shortest run that is judged for growth. Shorter ones say nothing: tables first fill to their bounds."""
OBJECTS = re.compile(r"^(prog|map|link)_id:\s*(\d+)", re.MULTILINE)
"""A line of /proc/PID/fdinfo (proc(5)) that names a BPF object."""
OF_EXPORTER = 'lockd_cpu_seconds_total{process="exporter"}'
"""A counter that begins at zero with every new exporter, because the exporter counts it for itself."""
CGROUPS = 3000
LIMITED = f"lockdfaults{os.getpid()}"
"""The name of the cgroup for processes whose resources are limited."""
LAST_TID, REUSED_SECONDS = Path("/proc/sys/kernel/ns_last_pid"), 2.0
"""The file with the thread id that was given last, and the seconds until it is set back. No id may be given
again within one sampling period: see IDS_GIVEN_TWICE."""
MOST_IDS = Path("/proc/sys/kernel/pid_max")
IDS_GIVEN_TWICE = 0.9
"""The share of all thread ids from which on one may have been given twice. If so many were given to new
threads, two of these may have had the same id within one sampling period of a sampler that stood still. What
one of them did may then be counted for the other (docs/limits.md, Waits)."""

MORE_IN_KERNEL = 10
"""The most waits for kernel locks, from one comparison to the next, that lockd may count in addition to those
that a workload reports: for example waits for locks of the memory manager and of cgroups."""

Event = tuple[str, str, str]
"""A metric, a label besides `comm`, and the value of that label. Both are empty if there is no such label."""


@dataclass(frozen=True)
class Load:
    """A workload that is run again and again, always under one name."""

    comm: str
    command: tuple[object, ...]


def loads(directory: Path) -> tuple[Load, ...]:
    """The workloads, under names that no other run on this host has.

    They make so few new threads that on a quiet host no thread id is given twice while the sampler stands
    still, even if there are only 32,768 ids.
    """
    us = f"{os.getpid():x}"
    return (
        Load(f"threads.{us}", ("clone_churn", 500, 50)),
        Load(f"forks.{us}", ("fork_storm", 100)),
        Load(f"locks.{us}", ("many_addrs", 1000, 300)),
        Load(f"mutex.{us}", ("mutex_handover", 100, 1000)),
        Load(f"storm.{us}", ("storm", 2, 1, 1, 50)),
        Load(f"crowd.{us}", ("crowd", 100, 5, 20_000, 1)),
        Load(f"kernel.{us}", ("kernel_locks", 20, 1000, directory)),
    )


def events_of(truth: dict[str, Any]) -> Counter[Event]:
    """Return the events that a workload reports, with the numbers that lockd should count."""
    found: Counter[Event] = Counter()
    for kind, told in truth.get("futex", {}).items():
        found["lockd_futex_waits_total", "kind", kind] = told["waits"]
        found["lockd_futex_blocked_seconds_count", "kind", kind] = told["blocked"]
    if "futex" in truth:
        found["lockd_futex_wakes_total", "", ""] = truth["wakes"]
    for error, count in truth.get("errors", {}).items():
        found["lockd_futex_errors_total", "error", error] = count
    if "kernel" in truth:  # of the other types a workload knows only some waits
        count = truth["kernel"]["mutex"]["waits"]
        found["lockd_kernel_lock_wait_seconds_count", "lock_type", "mutex"] = count
    return found


class Churn:
    """The workloads, each in a thread that runs it again and again, and what they did so far."""

    def __init__(self, host: Host, idle: bool) -> None:
        self._host, self._idle = host, idle
        self.told: dict[str, Counter[Event]] = defaultdict(Counter)
        """The events that each workload reported since all counts of lockd began at zero, by its name."""
        self.of_one_run: dict[str, Counter[Event]] = {}
        self.runs: Counter[str] = Counter()
        self.all_events = 0
        self.errors: list[str] = []
        self._may_run = threading.Event()
        self._turns: list[threading.Lock] = []

    def begin(self) -> None:
        for load in loads(self._host.make("files")):
            self._turns.append(threading.Lock())
            threading.Thread(target=self._repeat, args=(load, self._turns[-1]), daemon=True).start()
        self._may_run.set()

    def run(self, comm: str, *command: object) -> None:
        """Run a workload once, and add the events that it reports to `told`."""
        one = Workload(*map(str, command), comm=comm)
        if self._idle:
            os.sched_setscheduler(one.pid, os.SCHED_IDLE, os.sched_param(0))
        self._host.place(comm, one.pid)
        found = events_of(one.run())
        one.finish()
        self.told[comm] += found
        self.of_one_run[comm] = self.of_one_run.get(comm, Counter()) | found
        self.runs[comm] += 1
        self.all_events += sum(found.values())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which no workload runs."""
        self._may_run.clear()
        with contextlib.ExitStack() as stack:
            for turn in self._turns:
                stack.enter_context(turn)
            yield
        self._may_run.set()

    def _repeat(self, load: Load, turn: threading.Lock) -> None:
        while not self._host.over.wait(PAUSE_SECONDS):
            self._may_run.wait()
            with turn:
                if not self._may_run.is_set():
                    continue
                try:
                    self.run(load.comm, *load.command)
                except (Exception, pytest.skip.Exception) as error:
                    if not self._host.over.is_set():
                        self.errors.append(f"{load.comm}: {type(error).__name__}: {error}")
                    return


class Service:
    """lockd with a descriptor store, as systemd runs it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.directory = host.make("lockd")
        self.store: DescriptorStore | None = None
        self.cache = host.make("cache")
        self.life = 0
        """A number that changes whenever all counts of lockd begin at zero."""
        self.starts: list[Lockd] = []
        self.start()

    def start(self) -> None:
        self.store = self.store or DescriptorStore(self.directory)
        self.daemon = self.store.start(self.directory, CONFIG)
        self.starts.append(self.daemon)
        for pid in self.pids().values():
            self._host.place("lockd", pid)

    def stop(self) -> None:
        """Stop lockd as `systemctl stop` does: nothing is kept in the descriptor store."""
        self.life += 1
        if code := self.daemon.stop():
            raise RuntimeError(f"lockd ended with code {code}\n{''.join(self.daemon.log)}")
        assert self.store
        self.store.close()
        self.store = None

    def kill(self) -> None:
        self.daemon.process.kill()

    @property
    def has_ended(self) -> bool:
        return self.daemon.process.poll() is not None

    @property
    def log(self) -> list[str]:
        """The log of all starts, by line."""
        return [line for start in self.starts for line in list(start.log)]

    def pids(self) -> dict[str, int]:
        """The process id of each process of lockd that lives, by the name of the process."""
        return {} if self.has_ended else pids_of(self.daemon.process.pid)


def counters(text: str) -> dict[str, float]:
    """The values of all counters and of all series of histograms, by the line without its value."""
    found, counts = {}, False
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            counts = line.endswith((" counter", " histogram"))
        elif counts and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            found[series] = float(value)
    found.pop(OF_EXPORTER, None)
    return found


class Scrapes:
    """A scraper that looks every few seconds, as a Prometheus would, and notes each counter that falls."""

    def __init__(self, service: Service) -> None:
        self._service, self._life = service, -1
        self._last: dict[str, float] = {}
        self.count, self.failed, self.most_lines = 0, 0, 0
        self.fallen: list[str] = []

    def look(self) -> None:
        life = self._service.life
        self.count += 1
        try:
            text = get(f"http://{self._service.daemon.address}/metrics", SCRAPE_SECONDS).decode()
        except OSError:
            self.failed += 1
            return
        if life != self._service.life:
            return
        now = counters(text)
        self.most_lines = max(self.most_lines, sum(not line.startswith("#") for line in text.splitlines()))
        if life == self._life:
            words = time.strftime("%H:%M:%S")
            self.fallen += [
                f"{words} {series}: {self._last[series]:g}, then {value:g}"
                for series, value in now.items()
                if value < self._last.get(series, value)
            ]
        self._life, self._last = life, now


class Resources:
    """The resources that lockd's processes have, looked at every few seconds."""

    def __init__(self, service: Service) -> None:
        self._service, self.began = service, time.monotonic()
        self.looks: dict[str, dict[str, list[tuple[float, float]]]] = {}
        """By process and resource, for each look: seconds since the beginning, and the amount."""
        self.objects: set[tuple[str, str]] = set()
        """The BPF programs, maps and links that lockd ever had, as kind and id."""

    def look(self) -> None:
        at = time.monotonic() - self.began
        for process, pid in self._service.pids().items():
            with contextlib.suppress(OSError):  # it has ended
                self._note(process, at, self._found(process, pid))

    def _found(self, process: str, pid: int) -> dict[str, float]:
        found = {
            "MB": memory(pid).share / 1e6,
            "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
            "threads": float(len(os.listdir(f"/proc/{pid}/task"))),
        }
        if process == "sampler":
            objects = objects_of(pid)
            self.objects |= objects
            found["BPF objects"] = float(len(objects))
        return found

    def _note(self, process: str, at: float, found: dict[str, float]) -> None:
        for what, value in found.items():
            self.looks.setdefault(process, {}).setdefault(what, []).append((at, value))

    def report(self) -> list[dict[str, Any]]:
        return [
            {"process": process, "what": what, **halves(rows, most_grown(process, what))}
            for process, kinds in self.looks.items()
            for what, rows in kinds.items()
        ]


def most_grown(process: str, what: str) -> float:
    return FILES_GROWN if (process, what) == ("namer", "descriptors") else MOST_GROWN[what]


def halves(rows: Sequence[tuple[float, float]], most: float) -> dict[str, Any]:
    """The medians of both halves of the time, the largest value, and whether the values are flat."""
    middle = (rows[0][0] + rows[-1][0]) / 2
    first = statistics.median([value for at, value in rows if at <= middle])
    second = statistics.median([value for at, value in rows if at > middle] or [first])
    return {
        "first": first,
        "second": second,
        "most": max(value for _, value in rows),
        "is flat": second <= first * (1 + most),
    }


def objects_of(pid: int) -> set[tuple[str, str]]:
    """The BPF programs, maps and links of which a process has descriptors, as kind and id."""
    found: set[tuple[str, str]] = set()
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed just now
            found |= set(OBJECTS.findall(file.read_text()))
    return found


def objects_in_kernel() -> set[tuple[str, str]]:
    found = set()
    for what in ("prog", "map", "link"):
        listed = subprocess.run(["bpftool", "-j", what, "list"], capture_output=True, check=True).stdout
        found |= {(what, str(one["id"])) for one in json.loads(listed)}
    return found


def left_in_kernel(objects: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Wait until the kernel has freed these BPF objects; return those that it has not after FREED_SECONDS."""
    deadline = time.monotonic() + FREED_SECONDS
    left = objects
    while left and time.monotonic() < deadline:
        time.sleep(0.5)
        with contextlib.suppress(subprocess.CalledProcessError):  # something went while it listed
            left = objects & objects_in_kernel()
    return left


@dataclass
class Compared:
    """lockd's metrics, and the events of workloads since the last comparison that are missing in them."""

    metrics: Metrics
    missing: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Bench:
    """The whole bench: the service, the workloads beside it, those who look at it, and the findings."""

    def __init__(self, host: Host, idle: bool) -> None:
        self.host = host
        self.service = Service(host)
        self.churn = Churn(host, idle)
        self.resources, self.scrapes = Resources(self.service), Scrapes(self.service)
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.late: Counter[str] = Counter()
        """Ticks by the upper edge of how late they began, from before all counts last began at zero."""
        self.comparisons = 0
        self._forgiven: Counter[tuple[str, Event]] = Counter()
        """The events that were already missing at the last comparison."""
        self.last = self.service.daemon.metrics()
        host.every(SCRAPE_SECONDS, "scrape", self.scrapes.look)
        host.every(LOOK_SECONDS, "look at resources", self.resources.look)
        self.churn.begin()

    def compare(self, may_lose: bool = False, may_mix: bool = False) -> Compared:
        """Compare lockd's counts with the reports of the workloads. No workload may run meanwhile.

        `may_lose`: the sampler was replaced, and may have lost a drain. `may_mix`: thread ids may have been
        given twice.
        """
        metrics = self.service.daemon.metrics()
        found = Compared(metrics)
        self.comparisons += 1
        killed_draining = self._since(metrics, "lockd_interrupted_drains_total") if may_lose else 0.0
        for comm, told in self.churn.told.items():
            for event, truth in told.items():
                name, label, value = event
                labels = {"comm": comm, **({label: value} if label else {})}
                missing = truth - int(metrics.sum(name, **labels)) - self._forgiven[comm, event]
                if not missing:
                    continue
                self._forgiven[comm, event] += missing
                program = "kernel_locks" if "kernel_lock" in name else "futex"
                may_miss = self._since(metrics, "lockd_dropped_events_total", map=program)
                may_miss += killed_draining * self.churn.of_one_run[comm][event]
                if self._since(metrics, "lockd_overflow_events_total", map=program):
                    may_miss += self._since(metrics, name, **{**labels, "comm": "other"})
                words = f"{comm}: {name} {value}".strip()
                found.missing[words] = missing
                most_more = MORE_IN_KERNEL if program == "kernel_locks" else 0
                if may_mix:
                    may_miss += self.churn.of_one_run[comm][event]
                    most_more += self.churn.of_one_run[comm][event]
                if not -most_more <= missing <= may_miss:
                    found.wrong.append(f"{words}: {missing} of {truth} missing, at most {may_miss:g} may be")
        self.last = metrics
        return found

    def begins_anew(self) -> None:
        """Take note that all counts of lockd begin at zero. No workload may run meanwhile."""
        self.late += lateness(self.last)
        self.churn.told.clear()
        self._forgiven.clear()
        self.last = Metrics("")

    def _since(self, metrics: Metrics, name: str, **labels: str) -> float:
        return metrics.sum(name, **labels) - self.last.sum(name, **labels)

    def restart_if_ended(self) -> bool:
        if not self.service.has_ended:
            return False
        self.service.start()
        return True

    def inject(self, fault: Fault) -> None:
        before, late = self.service.pids(), self.late + lateness(self.last)
        metrics, logged = self.last, len(self.service.log)
        scrapes, ids, began = self.scrapes.failed, ids_given(), time.monotonic()
        wrong: list[str] = []
        note: str | None = None
        try:
            note = fault.act(self)
        except Exception as error:  # the report has it, and the next fault may succeed
            wrong.append(f"{type(error).__name__}: {error}")
        acted = time.monotonic()
        try:
            replaced = self._until_whole(fault, before)
        except TimeoutError as error:
            wrong.append(str(error))
            replaced = set()
        seconds = time.monotonic() - acted
        if not wrong and replaced != set(fault.replaced):
            wrong.append(f"replaced: {listed(replaced)}, not {listed(fault.replaced)}")
        log = "".join(self.service.log[logged:])
        if fault.says not in log:
            wrong.append(f"the log does not say {fault.says!r}")
        with self.churn.paused():
            ids = ids_given() - ids
            compared = self.compare("sampler" in replaced, ids >= IDS_GIVEN_TWICE * int(MOST_IDS.read_text()))
        wrong += compared.wrong
        now = compared.metrics

        def since(name: str, **labels: str) -> int:
            before = 0.0 if fault.is_fresh else metrics.sum(name, **labels)
            return int(now.sum(name, **labels) - before)

        ticks = self.late + lateness(now) - late
        row = {
            "at": (began - self.resources.began) / 60,
            "fault": fault.name,
            "replaced": sorted(replaced),
            "fault seconds": acted - began,
            "seconds until whole": seconds,
            "scrapes that failed": self.scrapes.failed - scrapes,
            "missing": compared.missing,
            "interrupted drains": since("lockd_interrupted_drains_total"),
            "taken over": since("lockd_taken_over_total"),
            "dropped": since("lockd_dropped_events_total"),
            "overflowed": since("lockd_overflow_events_total"),
            "ids given": ids,
            "ticks": ticks.total(),
            "latest tick": max(ticks, key=float, default=""),
            "note": note or "",
            "wrong": wrong,
        }
        self.rows.append(row)
        self.wrong += [f"{fault.name}: {one}" for one in wrong]
        words = "; ".join(wrong) or f"as it should be, missing {compared.missing or 'nothing'}"
        say(f"{fault.name}: whole after {seconds:.1f} s, replaced {listed(replaced)}: {words}")

    def _until_whole(self, fault: Fault, before: dict[str, int]) -> set[str]:
        """Wait until all processes run and metrics are served; return the names of the replaced processes."""
        deadline = time.monotonic() + WHOLE_SECONDS
        while True:
            if self.restart_if_ended() and "sampler" not in fault.replaced:
                self.wrong.append(f"{fault.name}: lockd ended")
            now = self.service.pids()
            replaced = {name for name in now if now[name] != before.get(name)}
            if len(now) == len(PROCESSES) and replaced >= set(fault.replaced) and self._is_serving():
                return replaced
            if time.monotonic() > deadline:
                raise TimeoutError(f"not whole after {WHOLE_SECONDS:g} s: {now}, before {before}")
            time.sleep(0.1)

    def _is_serving(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(get(f"http://{self.service.daemon.address}/metrics", 2))
        return False

    def go_on(self, seconds: float) -> None:
        """Let time pass without a fault. If lockd ends meanwhile, it is restarted, which is wrong."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.restart_if_ended():
                self.wrong.append("lockd ended by itself")
            time.sleep(min(1.0, max(deadline - time.monotonic(), 0)))


def ids_given() -> int:
    """The number of ids that threads and processes were given since this host booted."""
    (count,) = re.findall(r"^processes (\d+)", Path("/proc/stat").read_text(), re.MULTILINE)
    return int(count)


def lateness(metrics: Metrics) -> Counter[str]:
    """Ticks by the upper edge of how late they began, in seconds."""
    name = "lockd_tick_late_seconds_bucket"
    edges = sorted((labels["le"] for labels in metrics.labels(name)), key=float)
    found, below = Counter[str](), 0
    for edge in edges:
        count = int(metrics.sum(name, le=edge))
        found[edge], below = count - below, count
    return +found


@dataclass(frozen=True)
class Fault:
    """A fault. `act` causes it, and ends it unless lockd does; what it returns is a note in the report."""

    name: str
    act: Callable[[Bench], str | None]
    replaced: tuple[str, ...] = ()
    """The processes that must have been replaced afterwards. No others may be."""
    is_fresh: bool = False
    """Whether all counts of lockd begin at zero."""
    says: str = ""
    """A text that lockd has to write to its log."""


def signalled(process: str, number: signal.Signals) -> Callable[[Bench], None]:
    def act(bench: Bench) -> None:
        os.kill(bench.service.pids()[process], number)
        if process == "sampler":
            bench.service.daemon.process.wait(30)

    return act


def hangs(process: str) -> Callable[[Bench], None]:
    """The fault that a process is stopped, until lockd notices that it hangs."""
    return lambda bench: os.kill(bench.service.pids()[process], signal.SIGSTOP)


def stopped(process: str) -> Callable[[Bench], None]:
    def act(bench: Bench) -> None:
        pid = bench.service.pids()[process]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(FAULT_SECONDS)
        os.kill(pid, signal.SIGCONT)

    return act


def bursts(_: Bench) -> None:
    """Take all processors for half of the time, in bursts."""
    process = subprocess.Popen([sys.executable, "-m", "tests.bursts", "0.5"], cwd=ROOT)
    time.sleep(FAULT_SECONDS)
    end(process)


def little_cpu(bench: Bench) -> None:
    """Limit all processes of lockd together to 5% of a processor."""
    _, is_unified = hierarchy("cpu")
    value = "5000 100000" if is_unified else 5000
    with limited(LIMITED, "cpu", bench.service.pids().values(), "cpu.max", "cpu.cfs_quota_us", value):
        time.sleep(FAULT_SECONDS + 2)


def no_memory(process: str) -> Callable[[Bench], str]:
    def act(bench: Bench) -> str:
        """Limit the memory of the process, until the kernel has killed it."""
        pid, began = bench.service.pids()[process], time.monotonic()
        with limited(LIMITED, "memory", [pid], "memory.max", "memory.limit_in_bytes", 4096):
            while time.monotonic() < began + 3 * FAULT_SECONDS:
                for path in ("/metrics", "/api/v1/locks"):
                    with contextlib.suppress(OSError):
                        get(f"http://{bench.service.daemon.address}{path}", 1)
                if bench.service.has_ended or bench.service.pids().get(process) != pid:
                    return f"killed after {time.monotonic() - began:.1f} s"
                time.sleep(0.1)
        return "not killed"

    return act


def limit_of_descriptors(pid: int) -> tuple[str, str]:
    """The soft and the hard limit of a process for descriptors."""
    limits = Path(f"/proc/{pid}/limits").read_text()
    soft, hard = re.findall(r"^Max open files +(\S+) +(\S+)", limits, re.MULTILINE)[0]
    return soft, hard


def limit_descriptors(pid: int, soft: object, hard: object) -> None:
    """Set the limits of a process for descriptors, as its user: any other user needs CAP_SYS_RESOURCE."""
    status = Path(f"/proc/{pid}/status").read_text()
    user, group = re.findall(r"^[UG]id:\t(\d+)", status, re.MULTILINE)
    become = ("setpriv", "--reuid", user, "--regid", group, "--clear-groups")
    subprocess.run([*become, "prlimit", "--pid", str(pid), f"--nofile={soft}:{hard}"], check=True)


def no_descriptors(process: str) -> Callable[[Bench], None]:
    """The fault that a process has as many descriptors as its limit allows."""

    def act(bench: Bench) -> None:
        pid = bench.service.pids()[process]
        soft, hard = limit_of_descriptors(pid)
        limit_descriptors(pid, len(os.listdir(f"/proc/{pid}/fd")), hard)
        time.sleep(FAULT_SECONDS)
        limit_descriptors(pid, soft, hard)

    return act


def started_anew(
    spoiled: Callable[[Path], contextlib.AbstractContextManager[None]],
) -> Callable[[Bench], None]:
    """The fault that lockd is stopped, and started with a spoiled directory of compiled programs."""

    def act(bench: Bench) -> None:
        with bench.churn.paused():
            bench.wrong += bench.compare().wrong
            bench.service.stop()
            bench.begins_anew()
            with spoiled(bench.service.cache):
                bench.service.start()

    return act


@contextlib.contextmanager
def mounted(directory: Path, options: str) -> Iterator[None]:
    how = ("-t", "tmpfs", "-o", f"mode=0700,{options}")
    subprocess.run(["mount", *how, "lockd-faults", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", directory], check=True)


@contextlib.contextmanager
def full(directory: Path) -> Iterator[None]:
    with mounted(directory, "size=64k"):
        with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield


def read_only(directory: Path) -> contextlib.AbstractContextManager[None]:
    return mounted(directory, "ro")


@contextlib.contextmanager
def planted(directory: Path) -> Iterator[None]:
    """Give each file of the directory to another user, with other content."""
    kept = list(directory.iterdir())
    if not kept:
        raise RuntimeError("nothing that was compiled is kept")
    for file in kept:
        os.chown(file, 65534, 65534)
        file.write_bytes(file.read_bytes().replace(b"a", b"b"))
    yield


def many_cgroups(bench: Bench) -> str:
    """Make and remove many cgroups, with a process in every hundredth."""
    root = cgroup2()
    if not root:
        return "left out: no unified hierarchy"
    began = time.monotonic()
    for number in range(CGROUPS):
        cgroup = root / f"lockdfaults{os.getpid()}-{number}.service"
        cgroup.mkdir()
        if number % 100 == 0:
            with subprocess.Popen(["sleep", "0.05"]) as process:
                (cgroup / "cgroup.procs").write_text(str(process.pid))
        remove(cgroup)
    return f"{CGROUPS} in {time.monotonic() - began:.1f} s"


def reused_tids(_: Bench) -> str | None:
    """Give new threads, again and again, the ids that other threads have just had."""
    if not LAST_TID.exists():
        return "left out: the kernel cannot be told which id comes next"
    first, deadline = LAST_TID.read_text(), time.monotonic() + FAULT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(REUSED_SECONDS)
        LAST_TID.write_text(first)
    return None


def second_lockd(bench: Bench) -> None:
    directory = Path(tempfile.mkdtemp(dir=bench.host.directory))
    other = Lockd(directory, CONFIG)
    try:
        time.sleep(FAULT_SECONDS)
        counted = other.metrics().sum("lockd_futex_waits_total")
    finally:
        code = other.stop()
    if code:
        bench.wrong.append(f"the second lockd ended with code {code}: {''.join(other.log)[-500:]}")
    if not counted:
        bench.wrong.append("the second lockd counted nothing")


def faults() -> tuple[Fault, ...]:
    """All faults, in the order in which they are injected: large ones among small ones."""
    exporter, namer = ("exporter",), ("namer",)
    kill, fault = signal.SIGKILL, signal.SIGSEGV
    return (
        Fault("kill exporter", signalled("exporter", kill), exporter, says="ended by SIGKILL"),
        Fault("kill namer", signalled("namer", kill), namer, says="ended by SIGKILL"),
        Fault("kill sampler", signalled("sampler", kill), PROCESSES, says="attached still"),
        Fault("stop exporter", stopped("exporter")),
        Fault("stop namer", stopped("namer")),
        Fault("stop sampler", stopped("sampler")),
        Fault("segv exporter", signalled("exporter", fault), exporter, says="ended by SIGSEGV"),
        Fault("segv namer", signalled("namer", fault), namer, says="ended by SIGSEGV"),
        Fault("segv sampler", signalled("sampler", fault), PROCESSES, says="attached still"),
        Fault("hang exporter", hangs("exporter"), exporter, says="has said nothing for 30 s"),
        Fault("hang namer", hangs("namer"), namer, says="no answer for 30 s"),
        Fault("restart", signalled("sampler", signal.SIGTERM), PROCESSES, says="attached still"),
        Fault("bursts", bursts),
        Fault("little cpu", little_cpu),
        Fault("no memory exporter", no_memory("exporter"), exporter),
        Fault("no memory namer", no_memory("namer"), namer),
        Fault("no memory sampler", no_memory("sampler"), PROCESSES),
        Fault("no descriptors exporter", no_descriptors("exporter")),
        Fault("no descriptors namer", no_descriptors("namer")),
        Fault("no descriptors sampler", no_descriptors("sampler")),
        Fault("full cache", started_anew(full), PROCESSES, True, "what was compiled is not kept"),
        Fault("read-only cache", started_anew(read_only), PROCESSES, True, "what was compiled is not kept"),
        Fault("planted cache", started_anew(planted), PROCESSES, True, "not used"),
        Fault("many cgroups", many_cgroups),
        Fault("reused tids", reused_tids),
        Fault("second lockd", second_lockd),
    )


def measure(chosen: Sequence[Fault], minutes: float, every: float, idle: bool) -> dict[str, Any]:
    """Run the whole bench with each fault at least once, and return the figures for the report."""
    with contextlib.ExitStack() as ends:
        name = ends.enter_context(tempfile.TemporaryDirectory(prefix="lockd-bench-faults-", dir="/var/tmp"))
        Path(name).chmod(0o755)  # for processes of the user nobody
        host = Host(Path(name), ends)
        patch = ends.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("CACHE_DIRECTORY", str(host.directory / "cache"))
        bench = Bench(host, idle)
        ends.callback(bench.service.kill)
        began, number = time.monotonic(), 0
        while number < len(chosen) or time.monotonic() - began < minutes * 60:
            bench.go_on(max(began + (number + 1) * every - time.monotonic(), LEAST_SECONDS))
            bench.inject(chosen[number % len(chosen)])
            number += 1
        with bench.churn.paused():
            host.over.set()
            bench.wrong += bench.compare().wrong
            retired = bench.last.sum("lockd_series_retired_total")
            bench.service.stop()
        bench.late += lateness(bench.last)
        left = left_in_kernel(bench.resources.objects)
        return {
            "minutes": (time.monotonic() - began) / 60,
            "every": every,
            "faults": bench.rows,
            "wrong": bench.wrong + bench.churn.errors,
            "fallen": bench.scrapes.fallen,
            "scrapes": bench.scrapes.count,
            "scrapes that failed": bench.scrapes.failed,
            "most lines": bench.scrapes.most_lines,
            "comparisons": bench.comparisons,
            "runs": bench.churn.runs,
            "events": bench.churn.all_events,
            "retired": retired,
            "resources": bench.resources.report(),
            "looks": bench.resources.looks,
            "BPF objects ever": len(bench.resources.objects),
            "left in the kernel": sorted(left),
            "late": dict(sorted(bench.late.items(), key=lambda one: float(one[0]))),
            "errors": host.errors,
            "starts": len(bench.service.starts),
            "log": [line.strip() for line in bench.service.log],
        }  # fmt: skip


def failures(found: dict[str, Any]) -> list[str]:
    """What does not hold, in words."""
    wrong = [*found["wrong"], *(f"fell: {one}" for one in found["fallen"])]
    wrong += [f"left in the kernel: {what} {number}" for what, number in found["left in the kernel"]]
    wrong += [f"{what}: {all_of[-1]}" for what, all_of in found["errors"].items() if all_of]
    if tracebacks := sum(line.startswith("Traceback") for line in found["log"]):
        wrong.append(f"{tracebacks} tracebacks in the log of lockd")
    if found["minutes"] >= JUDGED_MINUTES:
        wrong += [
            f"{one['what']} of the {one['process']} grow: {one['first']:g}, then {one['second']:g}"
            for one in found["resources"]
            if not one["is flat"]
        ]
    return wrong


def listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words)) or "none"


def report(found: dict[str, Any], wrong: Sequence[str]) -> str:
    """The report as Markdown."""
    text = "# lockd under churn and faults\n\n"
    text += f"{found['minutes']:.0f} minutes, {len(found['faults'])} faults, {found['starts']} starts. "
    text += f"The workloads ran {found['runs'].total():,} times; the {found['events']:,} events that they "
    text += f"counted were compared {found['comparisons']} times. {found['scrapes']} scrapes, "
    text += f"{found['scrapes that failed']} of them failed; at most {found['most lines']:,} lines.\n\n"
    text += "".join(f"- **{one}**\n" for one in wrong) or "All holds.\n"
    rows: list[Sequence[object]] = [
        (
            f"{one['at']:.1f}", one["fault"], listed(one["replaced"]), f"{one['fault seconds']:.1f}",
            f"{one['seconds until whole']:.1f}", one["scrapes that failed"], sum(one["missing"].values()),
            one["interrupted drains"], one["dropped"], one["overflowed"], one["latest tick"], one["note"],
            "; ".join(one["wrong"]),
        )
        for one in found["faults"]
    ]  # fmt: skip
    head = "minute | fault | replaced | lasted s | whole after s | scrapes failed | events missing | "
    head += "interrupted drains | dropped | overflowed | latest tick at most s | note | wrong"
    text += "\n## Faults\n\n" + results.table(head, rows)
    ticks, below = sum(found["late"].values()), 0
    rows = []
    for edge, count in found["late"].items():
        below += count
        rows.append((edge, f"{count:,}", f"{below / ticks:.4%}"))
    text += "\n## How late ticks began\n\n" + results.table("at most s | ticks | up to here", rows)
    rows = [
        (one["process"], one["what"], *(f"{one[part]:.1f}" for part in ("first", "second", "most")),
         "yes" if one["is flat"] else "**no**")
        for one in found["resources"]
    ]  # fmt: skip
    head = "process | what | median of the first half | of the second | most | flat"
    text += "\n## Resources\n\nMemory is the proportional set size (PSS).\n\n" + results.table(head, rows)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="at least; default: %(default)g")
    parser.add_argument(
        "--every", type=float, default=60.0, help="seconds between faults; default: %(default)g"
    )
    parser.add_argument("--faults", help="some of them, with commas between; default: all")
    parser.add_argument("--without", default="", help="not these of them")
    parser.add_argument(
        "--idle", action="store_true", help="run the workloads in the scheduling class SCHED_IDLE"
    )
    args = parser.parse_args()
    known = {fault.name: fault for fault in faults()}
    names = args.faults.split(",") if args.faults else list(known)
    without = [name for name in args.without.split(",") if name]
    if unknown := {*names, *without} - {*known}:
        parser.error(f"no such fault: {listed(unknown)}; there are: {', '.join(known)}")
    chosen = [known[name] for name in names if name not in without]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    subprocess.run(["make", "-s", "-C", ROOT / "tests/workloads"], check=True)
    host = results.host()
    found = measure(chosen, args.minutes, args.every, args.idle)
    wrong = failures(found)
    text = report(found, wrong)
    results.write("faults", {"host": host, "failures": wrong, **found}, text)
    print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
