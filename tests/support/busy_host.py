"""A simulated busy host for the real aggregates: services that stay, and what cron, builds and logins start.

The names of short-lived programs were recorded by lockd on a Debian host that ran its daily jobs and a build.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from lockd import messages
from lockd.kernel.manifest import Chosen, Manifest
from lockd.kernel.maps import HashMap
from lockd.load.source import assemble
from lockd.names.client import Resolver
from lockd.names.labels.processes import Processes
from lockd.names.labels.units import Units
from lockd.names.protocol import ANON, LockAnswer, UserLockSeen
from lockd.sample.aggregates.contention import ContentionTables
from lockd.sample.aggregates.futex import FutexAggregates
from lockd.sample.aggregates.identities import Filter, Identities
from lockd.sample.aggregates.offcpu import OffcpuAggregates
from lockd.sample.aggregates.ongoing import OngoingWaits
from lockd.sample.aggregates.window import make_window
from lockd.sample.locks.runtimes import HOTSPOT, RuntimePlaces
from lockd.sample.locks.user_locks import UserLocks
from lockd.sample.series.block import Block
from lockd.sample.series.label_hash import hash_labels
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.ranking import Presence
from lockd.sample.series.series import Series

CRON = """
apt-cache apt-compat apt-config apt-get apt.systemd.dai awk basename bash cat chmod chown chrt cksum cmp cp
curl cut date dd df diff dirname dpkg dpkg-db-backup dpkg-query du echo env exe expr find findmnt flock free
getent grep gzip head hostname id ip join journalctl logger ls man-db mandb md5sum mkdir mktemp mount mv
my_print_defaul mariadb-install nice nl openssl paste perl pgrep ps python3 python3.11 readlink resolveip
rev rm run-parts savelog sed seq sh sleep sort ss start-stop-daem stat systemctl tac tail tar tee timeout
touch tr true uname uniq unshare uptime vmstat wc whoami xargs xz zcat
""".split()  # noqa: SIM905
BUILD = """
make sh bash gcc cc cc1 cc1plus g++ as ld collect2 ar ranlib strip nm objdump objcopy readelf size ldconfig
pkg-config cmake cargo rustc go javac java git pyenv pyenv-hooks pyenv-which python3.8 python3.9 python3.10
python3.12 python3.13 mypy ruff promtool pprof conftest sed grep cp mv rm mkdir
""".split()  # noqa: SIM905
SERVICES = """
mariadbd postgres redis-server nginx php-fpm8.2 memcached java node prometheus grafana dockerd containerd
sshd cron dbus-daemon systemd-journal rsyslogd snapd unbound chronyd haproxy rabbitmq-server beam.smp etcd
vector
""".split()  # noqa: SIM905

SECOND, MS = 10**9, 10**6
STEP = 10
"""The time between two looks at the processes, in seconds."""
WHO = [("cgroup", "u8"), ("comm", "S16"), ("thread_comm", "S16"), ("tgid", "u4"), ("kernel_thread", "u4")]
FUTEX_KEY = np.dtype(
    [("uaddr", "u8"), ("tid", "u4"), ("kind", "u1"), ("slot", "u1"), ("error", "u1"), ("pad", "u1")]
)
FUTEX = np.dtype(
    [("calls", "u8"), ("blocked_ns", "u8"), ("max_blocked_ns", "u8"), ("sys_ns", "u8"), ("max_sys_ns", "u8"),
     ("who", WHO)]
)  # fmt: skip
OFFCPU_KEY = np.dtype(
    [("tid", "u4"), ("waker", "u4"), ("nr", "i2"), ("state", "u1"), ("iowait", "u1"), ("detail", "u1"),
     ("blocked_slot", "u1"), ("run_slot", "u1"), ("pad", "u1")]
)  # fmt: skip
OFFCPU = np.dtype(
    [("count", "u8"), ("blocked_ns", "u8"), ("max_blocked_ns", "u8"), ("run_ns", "u8"), ("who", WHO)]
)
NR_READ, NR_EPOLL, NR_SLEEP, NR_WAIT = 0, 232, 35, 61
LOCK, COND, WAKE = 0, 2, 4
HOT_MS = 2000


@dataclass
class Process:
    """A process that waits for work on a condition variable, now and then for locks, and in system calls."""

    tgid: int
    unit: str
    comm: str
    lasts: float = 0.0
    """How many more seconds the process lives; 0: it ends before the next look."""
    locks: int = 1
    blocked_ms: int = 20
    """The time that it waits for each of its locks in a step, in ms."""
    calls: tuple[int, ...] = (NR_READ,)
    call_ms: int = 80
    """The time that it is off the CPU in each of its system calls in a step, in ms."""

    @property
    def addresses(self) -> Iterator[int]:
        return (self.tgid << 16 | number for number in range(self.locks))


class UnitsById:
    """A stand-in for Units, in which each unit has a number as the id of its cgroup."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._units: dict[int, str] = {}

    def number(self, unit: str) -> int:
        number = self._numbers.setdefault(unit, len(self._numbers) + 1)
        self._units[number] = unit
        return number

    def unit(self, cgroup: int, tgid: int, last: str) -> str:
        return self._units.get(cgroup, "")


class NamesAtOnce:
    """A resolver that names every lock at once, as `mutex_ADDRESS`; or no lock while it has no stacks."""

    room = 1000
    has_stacks = True
    key = np.dtype([("uaddr", "u8"), ("tgid", "u4"), ("guess", "u4")])

    def __init__(self) -> None:
        self.answers: list[LockAnswer] = []
        self._asked: list[UserLockSeen] = []

    def ask(self, seen: UserLockSeen, is_needed: bool = True) -> bool:
        lock, site = (f"app:mutex_{seen.address & 0xFFFF}", "app:work") if self.has_stacks else (ANON, "")
        self._asked.append(seen)
        self.answers.append(
            LockAnswer(seen.key, True, lock, site, (), seen.guess, is_provisional=not self.has_stacks)
        )
        return True

    def ask_again(self) -> None:
        """Answer all questions so far again, now with stacks."""
        self.has_stacks, asked, self._asked = True, self._asked, []
        for seen in asked:
            self.ask(seen)

    def watch(self, tgids: list[int]) -> None:
        """Do nothing: the answers do not depend on which processes there are."""

    def forget_ended(self, alive: set[int]) -> None:
        """Do nothing: the answers do not depend on which processes have ended."""

    def delete(self, keys: Any) -> None:
        """Do nothing: this object stands in for the map of known locks too, from which keys are deleted."""


@dataclass
class BusyHost:
    """The aggregates of one host, with a clock of its own."""

    procfs: Path
    limits: Limits = field(default_factory=Limits)
    mode: str = "blocked"
    """The mode of the program futex."""

    def __post_init__(self) -> None:
        source = assemble(
            ["include/common.bpf.h", "include/arch.bpf.h", "daemon/futex.bpf.c", "daemon/sched.bpf.c"], {}
        )
        manifest = Manifest(
            attached_ns=0,
            chosen=(Chosen("futex", "calls", "tracepoint", ""),) if self.mode == "calls" else (),
            hooks=(), maps=(), functions=(),
            enums=source.enums, constants={**source.constants, "SLOTS": 28, "SLOT_NONE": 255},
        )  # fmt: skip
        self.units = UnitsById()
        processes = Processes(cast("Units", self.units), self.procfs)
        self._identities, self._processes = Identities(processes, Filter()), processes
        self._contention = ContentionTables(processes.thread_comm, 20_000)
        self.names = NamesAtOnce()
        self._user_locks = UserLocks(
            cast("Resolver", self.names),
            cast("HashMap", self.names),
            RuntimePlaces(cast("HashMap", self.names), HOTSPOT),
            None,
            list(source.enums["futex_kind"]),
            lambda tgid: True,
            captured_again_ns=10_000_000_000,
        )
        shared = (manifest, self.limits, LineBudget(self.limits), self._contention)
        self.futex = FutexAggregates(*shared, self._user_locks)
        self.offcpu = OffcpuAggregates(*shared, processes)
        self.series: list[Series] = [*self.futex.series, *self.offcpu.series]
        self.presence = Presence()
        self.now = 1000.0
        self.truth = dict.fromkeys(
            (
                "waits",
                "wakes",
                "errors",
                "blocked",
                "blocked_ns",
                "offcpu",
                "offcpu_ns",
                "runqueue",
                "run_ns",
            ),
            0,
        )

    def step(self, processes: list[Process], ended: list[Process]) -> None:
        """Simulate STEP seconds in which all these processes wait. At the end, those in `ended` are gone."""
        self.now += STEP
        both = processes + ended
        self._fold_futex(both)
        self._fold_offcpu(both)
        for answer in self.names.answers:
            self._user_locks.note_answer(answer)
        self.names.answers.clear()
        self._look(processes)
        alive = {process.tgid: (process.unit, process.comm) for process in processes}
        self._processes.keep(set(alive))
        self.presence.note(set(alive.values()), self.now)
        for series in self.series:
            series.advance(self.now)
            series.rearrange(self.presence, self.limits.idle_seconds, self.now)
        self._contention.expire(self.now, alive)
        self._user_locks.forget_ended(set(alive), self.now)

    def _who(self, process: Process) -> tuple[Any, ...]:
        comm = process.comm.encode()
        return (self.units.number(process.unit), comm, comm, process.tgid, 0)

    def _fold_futex(self, processes: list[Process]) -> None:
        keys, values = [], []
        for process in processes:
            who = self._who(process)
            for address in process.addresses:
                keys.append((address, process.tgid, LOCK, 11, 0, 0))
                values.append((10, process.blocked_ms * MS, process.blocked_ms // 4 * MS, MS, MS, who))
            keys.append((process.tgid << 16 | 0xFFFF, process.tgid, COND, 15, 0, 0))
            values.append((5, 200 * MS, 50 * MS, MS, MS, who))
            if self.mode == "calls":
                keys.append((process.tgid << 16 | 0xFFFF, process.tgid, WAKE, 255, 0, 0))
                values.append((3, 0, 0, MS, MS, who))
                keys.append((process.tgid << 16, process.tgid, LOCK, 255, errno.EAGAIN, 0))
                values.append((2, 0, 0, MS, MS, who))
                self.truth["waits"] += 10 * process.locks + 5 + 2
                self.truth["wakes"] += 3
                self.truth["errors"] += 2
            self.truth["blocked"] += 10 * process.locks + 5
            self.truth["blocked_ns"] += process.blocked_ms * MS * process.locks + 200 * MS
        if keys:
            rows = np.array(keys, FUTEX_KEY), np.array(values, FUTEX)
            self.futex.fold(make_window(*rows, self._identities, has_overflowed=False), self.now)

    def _fold_offcpu(self, processes: list[Process]) -> None:
        keys, values = [], []
        for process in processes:
            who = self._who(process)
            for nr in process.calls:
                keys.append((process.tgid, process.tgid, nr, 0, 0, 0, 12, 5, 0))
                values.append((4, process.call_ms * MS, 30 * MS, MS, who))
                self.truth["offcpu"] += 4
                self.truth["offcpu_ns"] += process.call_ms * MS
                self.truth["runqueue"] += 4
                self.truth["run_ns"] += MS
        if keys:
            rows = np.array(keys, OFFCPU_KEY), np.array(values, OFFCPU)
            self.offcpu.fold(make_window(*rows, self._identities, has_overflowed=False), self.now)

    def _look(self, processes: list[Process]) -> None:
        """Note ongoing waits: each process has a thread that waits for work, and one in its first call."""
        count = len(processes)
        tgids = np.array([process.tgid for process in processes], np.int64)
        names = np.empty(count, object)
        names[:] = [(process.unit, process.comm) for process in processes]
        codes = np.array([hash_labels(name) for name in names], np.uint64)
        who = np.zeros(count, [("tgid", np.uint32), ("thread_comm", "S16")])
        who["tgid"] = tgids
        waited = np.full(count, STEP * SECOND, np.int64)

        def waiting(kinds: Any, addresses: Any) -> OngoingWaits:
            return OngoingWaits(
                tgids, tgids, kinds, addresses, waited, codes, names, who,
                has_detail=True, is_lower_bound=np.zeros(count, np.bool_),
            )  # fmt: skip

        addresses = (tgids << 16 | 0xFFFF).astype(np.uint64)
        self.futex.note_waiting(waiting(np.full(count, COND), addresses), self.now)
        threads = np.zeros(count, [("nr", "i2"), ("state", "u1"), ("iowait", "u1"), ("detail", "u1")])
        threads["nr"] = [process.calls[0] for process in processes]
        kinds = self.offcpu.wait_kinds(threads)
        self.offcpu.note_waiting(waiting(kinds, np.zeros(count, np.uint64)), self.now)

    def exported(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return the values by metric and labels. A histogram has its counts and its sums."""
        block = Block(self.limits.buckets_us, 28)
        self.futex.export(block, self.now)
        self.offcpu.export(block, self.now)
        head, arrays = messages.unpack(memoryview(block.pack()))
        values: dict[str, dict[tuple[str, ...], float]] = {}
        for each in head["metrics"]:
            name, labels = each["name"], [tuple(row) for row in each["labels"]]
            if name in arrays:
                values[name] = dict(zip(labels, arrays[name], strict=True))
            else:
                counts = np.array(arrays[f"{name}.buckets"]).reshape(len(labels), -1).sum(axis=1).tolist()
                values[f"{name}_count"] = dict(zip(labels, counts, strict=True))
                values[f"{name}_sum"] = dict(zip(labels, arrays[f"{name}.sum"], strict=True))
        return values

    def lines(self) -> int:
        return sum(series.exported_lines for series in self.series)

    def retired(self) -> dict[str, float]:
        return {metric: value for series in self.series for metric, value in series.retired_values().items()}


class Crowd:
    """Processes that come and go: of cron each minute, of builds in containers and of logins now and then."""

    def __init__(self, seed: int, tgids: Iterator[int]) -> None:
        self._random = np.random.default_rng(seed)
        self._tgids = tgids
        self._lasting: list[Process] = []
        self.comms: set[tuple[str, str]] = set()

    def step(self, second: int) -> tuple[list[Process], list[Process]]:
        """Return the processes that are there at the end of a step, and those that ended in it."""
        ended = []
        if second % 60 == 0:
            ended += self._some("cron.service", CRON, 30)
        if second % 3600 == 0:
            ended += self._some("cron.service", CRON, 200)
        ended += self._some("node-exporter.service", ("sh", "smartctl", "ipmitool", "cut", "sed", "tr"), 3)
        if second % 300 == 0:
            container = f"{self._random.integers(1 << 48):012x}"
            tests = [f"test_{self._random.integers(10**6)}" for _ in range(20)]
            ended += self._some(container, BUILD, 60) + self._some(container, tests, 20)
            self._lasting += self._some(container, ("make", "cc1plus", "rustc", "docker-init"), 4, 240)
        if second % 600 == 0:
            session = f"session-{second // 600}.scope"
            ended += self._some(session, CRON, 10)
            self._lasting += self._some(session, ("sshd", "bash", "vim", "less"), 3, 900)
        for process in self._lasting:
            process.lasts -= STEP
        ended += [process for process in self._lasting if process.lasts <= 0]
        self._lasting = [process for process in self._lasting if process.lasts > 0]
        self.comms.update((process.unit, process.comm) for process in ended)
        return self._lasting, ended

    def _some(self, unit: str, comms: Any, count: int, lasts: float = 0.0) -> list[Process]:
        chosen = self._random.choice(comms, count)
        return [Process(next(self._tgids), unit, str(comm), lasts) for comm in chosen]


def services(random: np.random.Generator, tgids: Iterator[int], seconds: int) -> dict[int, list[Process]]:
    """Return the services by the step in which they start: half of them in step 0, the others at any time."""
    started: dict[int, list[Process]] = {}
    calls = (NR_READ, NR_EPOLL, NR_SLEEP, NR_WAIT)
    for number, comm in enumerate(SERVICES):
        count = int(random.integers(1, 4))
        blocked_ms = HOT_MS if number % 5 == 0 else 20
        one = Process(
            next(tgids), f"{comm}.service", comm, seconds, 1 + number % 3, blocked_ms, calls[:count]
        )
        at = 0 if number % 2 else int(random.integers(1, seconds // STEP - 12))
        started.setdefault(at, []).append(one)
    return started


def numbers() -> Iterator[int]:
    return itertools.count(1000)
