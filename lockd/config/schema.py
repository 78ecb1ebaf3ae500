"""lockd's configuration: what can be set, its defaults, and reading it from a YAML file.

Each key is described once, by the field that holds it: its type and rule, its default as one
would write it in the file, and what it means. Reading, error messages and the commented file
config/lockd.yaml (see config/docs.py) all follow from these fields. Durations are integers in
nanoseconds; a field `period_ns` is the key `period`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockd.config.reader import key, read_file, section
from lockd.config.rules import (
    STR,
    absolute_path,
    address,
    boolean,
    choice,
    duration,
    glob,
    integer,
    list_of,
    or_none,
    or_word,
    parse_duration,
    power_of_two,
    scalar,
    share,
    within,
)

COMM_BYTES = 15
"""The kernel keeps this much of a process's name."""
LARGEST_PID = 4_194_304
LARGEST_MAP = 1_048_576
LARGEST_BUCKET_US = 67_108_864


@dataclass(frozen=True)
class Window:
    """A time span over which maxima are kept; `name` is the value of the label `window`."""

    name: str
    ns: int


def _window(text: str) -> Window:
    ns = within(parse_duration(text), parse_duration("10s"), parse_duration("24h"))
    return Window(text, ns)


@dataclass(frozen=True)
class Program:
    """What can be set for every program."""

    enabled: bool = key(boolean(), "true", "Whether this program runs.")
    mechanism: str = key(
        choice("auto", "tracepoint", "fentry", "kprobe"),
        "auto",
        "How the kernel is hooked; `auto` takes the best that this kernel has (see `lockd doctor`).",
    )


@dataclass(frozen=True)
class Futex(Program):
    """Waits for user-space locks, through the futex system calls."""


@dataclass(frozen=True)
class Offcpu(Program):
    """Everything else that takes a thread off the CPU, and who ends the wait."""

    mechanism: str = key(
        choice("auto", "tracepoint"),
        "auto",
        "How the kernel is hooked: by tracepoints, which every kernel has that BPF programs can trace.",
    )


@dataclass(frozen=True)
class KernelLocks(Program):
    """Waits for locks inside the kernel."""

    mode: str = key(
        choice("contention", "all"),
        "contention",
        "What is counted: `contention` counts the acquisitions that have to wait, which costs "
        "nothing while there is no contention; `all` counts every acquisition and how long the "
        "lock is held, at a cost for each of them.",
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.mode == "all" and self.mechanism == "tracepoint":
            yield "mechanism", "does not do for mode all: no tracepoint tells every acquisition"


@dataclass(frozen=True)
class Programs:
    """What is measured. Each program can be left out; at least one must run."""

    futex: Futex = section(Futex)
    offcpu: Offcpu = section(Offcpu)
    kernel_locks: KernelLocks = section(KernelLocks)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if not (self.futex.enabled or self.offcpu.enabled or self.kernel_locks.enabled):
            yield "", "enables no program; one must run"


@dataclass(frozen=True)
class Filter:
    """Whose waits are counted. An empty list keeps everybody."""

    units: tuple[str, ...] = key(
        list_of(glob(), "a list of names or shell patterns"),
        "[]",
        'Only these systemd units or containers, such as ["nginx.service", "user@*"].',
        reloads=True,
    )
    comms: tuple[str, ...] = key(
        list_of(glob(COMM_BYTES), "a list of names or shell patterns"),
        "[]",
        'Only processes of these names, such as [postgres, "php-fpm*"].',
        reloads=True,
    )
    exclude_comms: tuple[str, ...] = key(
        list_of(glob(COMM_BYTES), "a list of names or shell patterns"),
        "[]",
        "Not the processes of these names, even if the lists above have them.",
        reloads=True,
    )
    pids: tuple[int, ...] = key(
        list_of(integer(1, LARGEST_PID), "a list of process ids"),
        "[]",
        "Only these processes.",
        reloads=True,
    )
    min_block_ns: int = key(
        duration("0", "24h"),
        "0",
        "Leave out waits that were shorter than this. Acquisitions and holds always count.",
    )
    max_block_ns: int | None = key(
        or_none(duration("1us", "24h"), "none"), "none", "Leave out waits that were longer."
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.max_block_ns is not None and self.max_block_ns <= self.min_block_ns:
            yield "max_block", "is not longer than min_block, so nothing could be counted"


@dataclass(frozen=True)
class Histogram:
    """The buckets of all histograms."""

    buckets_us: tuple[int, ...] = key(
        list_of(
            power_of_two(1, LARGEST_BUCKET_US),
            f"a list of powers of two from 1 to {LARGEST_BUCKET_US}, each larger than the last",
            lambda edges: bool(edges) and list(edges) == sorted(set(edges)),
        ),
        f"[{', '.join(str(4**power) for power in range(14))}]",
        "The upper edges of the buckets in microseconds; the bucket for everything above comes by "
        "itself. Fewer buckets are fewer series.",
    )


@dataclass(frozen=True)
class Series:
    """Bounds on what Prometheus gets to store."""

    max: int = key(
        integer(1_000, 1_000_000),
        "10000",
        "The most lines /metrics ever has; what gets no series of its own is counted under `other`.",
    )
    idle_ns: int = key(
        duration("1m", "30d"),
        "1h",
        "A series goes away after this long with nothing new, once its process is gone; after 30 s if "
        "others need the room.",
        reloads=True,
    )
    top_locks: int = key(
        integer(1, 10_000),
        "50",
        "How many locks have series of their own: those that are most contended at the time.",
    )


@dataclass(frozen=True)
class Maps:
    """The sizes of the tables in the kernel. What does not fit is counted, never silently lost."""

    entries: int = key(
        power_of_two(64, LARGEST_MAP),
        "8192",
        "Threads and locks with waits in one period, for each program.",
    )
    threads: int = key(power_of_two(64, LARGEST_MAP), "16384", "Threads that wait at the same moment.")
    stacks: int = key(power_of_two(64, LARGEST_MAP), "1024", "Call stacks in the kernel within one period.")


@dataclass(frozen=True)
class Names:
    """What locks are called, and of what kind they are. See docs/lock-names.md."""

    parked: tuple[str, ...] = key(
        list_of(glob(), "a list of names or shell patterns"),
        "[]",
        'Locks that idle threads park on, by their label `lock`, such as ["pooled:gate", "*:idle_mutex"]: '
        "who has work for a thread holds the lock until there is some. Waits for them are of the kind "
        "`cond`, as all waits for work, and no alert speaks of them. Those that lockd knows need not be "
        "here, such as Redis' io_threads_mutex.",
    )


AUTO = 0.0
"""No share that could be written."""


@dataclass(frozen=True)
class Budget:
    """What lockd may cost. See docs/restraint.md."""

    cpu: float | None = key(
        or_none(or_word(share("0.01%", "100%"), "auto", AUTO), "none"),
        "auto",
        "Of the CPU time of the whole machine, for all that lockd does by itself. While that takes more, "
        "lockd tells less, step by step; totals stay exact. auto: 2%, or a fifth of one processor where that "
        "is more.",
        reloads=True,
    )
    requests: float | None = key(
        or_none(share("1%", "100%"), "none"),
        "25%",
        "Of the CPU time of one processor, for the tables and profiles that one address asks for (all of "
        "this host are one). What it does not take is saved, 10 s of it at most; while that is used up it is "
        "told to come back later, by status 429. Whoever scrapes /metrics never is. See docs/web.md.",
        reloads=True,
    )

    def share(self, cpus: int) -> float | None:
        """Of a machine of so many processors; None: no limit."""
        return max(0.02, 0.2 / cpus) if self.cpu == AUTO else self.cpu


@dataclass(frozen=True)
class Web:
    """Where Prometheus and people reach lockd."""

    listen: tuple[tuple[str, int], ...] = key(
        list_of(
            address(),
            "a list of different addresses, at least one",
            lambda addresses: bool(addresses) and len(set(addresses)) == len(addresses),
        ),
        '["127.0.0.1:9776"]',
        "Addresses to listen on. Names of programs and locks can be private: without TLS and a "
        "password, keep to the loopback address. --web.listen-address overrides this.",
    )
    config_file: Path | None = key(
        or_none(absolute_path(), "null"),
        "null",
        "TLS and passwords, in the file format of the Prometheus exporters (exporter-toolkit). "
        "--web.config.file overrides this.",
    )


@dataclass(frozen=True)
class Log:
    """What lockd says about its own work."""

    level: str = key(
        choice("debug", "info", "warning", "error"),
        "info",
        "The least important messages that are still logged. --log.level overrides this.",
        reloads=True,
    )


@dataclass(frozen=True)
class Config:
    """Everything that can be set."""

    period_ns: int = key(
        duration("10ms", "10s"),
        "50ms",
        "How often the counts are collected from the kernel: the sampling window.",
        reloads=True,
    )
    programs: Programs = section(Programs)
    filter: Filter = section(Filter)
    windows: tuple[Window, ...] = key(
        list_of(
            scalar("a duration from 10s to 24h, such as 1m or 1h30m", {STR}, _window),
            "a list of 1 to 4 different durations, each from 10s to 24h",
            lambda windows: 1 <= len(windows) <= 4 and len({w.ns for w in windows}) == len(windows),
        ),
        "[1m, 5m]",
        "The time spans of the `max` metrics. The alerts that come with lockd use 1m. A reload takes others, "
        "but no more of them than there were at the start.",
        reloads=True,
    )
    histogram: Histogram = section(Histogram)
    series: Series = section(Series)
    maps: Maps = section(Maps)
    names: Names = section(Names)
    budget: Budget = section(Budget)
    web: Web = section(Web)
    log: Log = section(Log)


def default() -> Config:
    """What lockd does without a configuration file."""
    return Config()


def load(path: Path | None) -> Config:
    """The configuration in a file, or the defaults; raises ConfigError with all its problems."""
    return default() if path is None else read_file(Config, path)
