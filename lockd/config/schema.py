"""The keys of lockd's configuration: their rules, defaults and descriptions.

Each key is described once, by the field that holds its value. Reading, error messages and the commented file
config/lockd.yaml (lockd/config/docs.py writes it) all follow from these fields. Durations are integers in
nanoseconds; the field `period_ns` is the key `period`.

The docstrings of the sections are shown to users, in config/lockd.yaml.
"""

from __future__ import annotations

import math
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
"""The most bytes of a process's name (comm) that the kernel keeps."""
LARGEST_PID = 4_194_304
LARGEST_MAP = 1_048_576
LARGEST_BUCKET_US = 67_108_864
OWN_LINES, LOCK_TYPES, LOCK_TYPES_HELD = 400, 10, 4
"""Lines of /metrics about lockd itself; types of kernel locks, and those of them that are held."""
AUTO = 0
"""The value of a key that is `auto` in the file. It is below every number that the key accepts."""


@dataclass(frozen=True)
class Window:
    """A span of `ns` nanoseconds over which maxima are kept. `name` is the value of the label `window`."""

    name: str
    ns: int


def _window(text: str) -> Window:
    ns = within(parse_duration(text), parse_duration("10s"), parse_duration("24h"))
    return Window(text, ns)


@dataclass(frozen=True)
class Program:
    """The keys that every program has."""

    enabled: bool = key(boolean(), "true", "Whether lockd loads this program and exports its metrics.")
    mechanism: str = key(
        choice("auto", "tracepoint", "fentry", "kprobe"),
        "auto",
        "How the program is attached to the kernel. `auto` takes the best mechanism of this kernel, as "
        "`lockd doctor` shows.",
    )


@dataclass(frozen=True)
class Futex(Program):
    """Waits for locks in user space (futexes)."""

    mode: str = key(
        choice("blocked", "calls"),
        "blocked",
        "What is counted. `blocked` counts the waits in which a thread is blocked. lockd sees them where the "
        "thread leaves the CPU, and is attached to no system call. `calls` counts every futex call as well: "
        "waits that did not block, wakes, errors and sys time. While it does so, the kernel takes a longer "
        "way through every system call of every thread. See docs/metrics.md#futex-modes.",
    )
    mechanism: str = key(
        choice("auto", "tracepoint", "fentry", "kprobe"),
        "auto",
        "How the program is attached to the futex calls in mode `calls`. `auto` takes the best mechanism of "
        "this kernel, as `lockd doctor` shows. Mode `blocked` has one way only.",
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.mode == "blocked" and self.mechanism != "auto":
            yield "mechanism", "takes effect in mode calls only, and the mode is blocked"


@dataclass(frozen=True)
class Offcpu(Program):
    """All waits off the CPU, those for locks included, with the process that ended each of them."""

    mechanism: str = key(
        choice("auto", "tracepoint"),
        "auto",
        "How the program is attached to the kernel. Tracepoints are the only mechanism, and every supported "
        "kernel has them.",
    )


@dataclass(frozen=True)
class KernelLocks(Program):
    """Waits for locks inside the kernel."""

    mode: str = key(
        choice("contention", "all"),
        "contention",
        "Which acquisitions are counted. `contention` counts those that have to wait, which costs nothing "
        "while there is no contention. `all` counts every acquisition of a mutex, rwsem or semaphore and "
        "how long the lock is held, which costs CPU time at each of them.",
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.mode == "all" and self.mechanism == "tracepoint":
            yield "mechanism", "does not do for mode all: no tracepoint reports every acquisition"


@dataclass(frozen=True)
class Programs:
    """What lockd measures. Each program can be switched off; at least one must run."""

    futex: Futex = section(Futex)
    offcpu: Offcpu = section(Offcpu)
    kernel_locks: KernelLocks = section(KernelLocks)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if not (self.futex.enabled or self.offcpu.enabled or self.kernel_locks.enabled):
            yield "", "enables no program; one must run"


@dataclass(frozen=True)
class Filter:
    """Which waits lockd counts, and whose. A process must match each of units, comms and pids that is not
    empty."""

    units: tuple[str, ...] = key(
        list_of(glob(), "a list of names or shell patterns"),
        "[]",
        "Count only processes of these systemd units or containers, such as "
        '["nginx.service", "user-1000.slice/*"].',
        reloads=True,
    )
    comms: tuple[str, ...] = key(
        list_of(glob(COMM_BYTES), "a list of names or shell patterns"),
        "[]",
        'Count only processes with these names (comm), such as [postgres, "php-fpm*"].',
        reloads=True,
    )
    exclude_comms: tuple[str, ...] = key(
        list_of(glob(COMM_BYTES), "a list of names or shell patterns"),
        "[]",
        "Leave out processes with these names (comm), even if they match the other lists.",
        reloads=True,
    )
    pids: tuple[int, ...] = key(
        list_of(integer(1, LARGEST_PID), "a list of process ids"),
        "[]",
        "Count only these processes, given by their ids.",
        reloads=True,
    )
    min_block_ns: int = key(
        duration("0", "24h"),
        "0",
        "Leave out waits that were shorter than this. Acquisitions and holds of kernel locks always count. "
        "Waits that have not ended show in gauges and maxima, however long they are.",
    )
    max_block_ns: int | None = key(
        or_none(duration("1us", "24h"), "none"),
        "none",
        "Leave out waits that were longer than this. Acquisitions and holds of kernel locks always count. "
        "Waits that have not ended show in gauges and maxima, however long they are.",
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.max_block_ns is not None and self.max_block_ns <= self.min_block_ns:
            yield "max_block", "is not longer than min_block, so nothing could be counted"


@dataclass(frozen=True)
class Histogram:
    """The buckets of all histograms that Prometheus reads."""

    buckets_us: tuple[int, ...] = key(
        list_of(
            power_of_two(1, LARGEST_BUCKET_US),
            f"a list of powers of two from 1 to {LARGEST_BUCKET_US}, each larger than the last",
            lambda edges: bool(edges) and list(edges) == sorted(set(edges)),
        ),
        f"[{', '.join(str(4**power) for power in range(14))}]",
        "Upper edges of the buckets, in microseconds. The bucket for all longer times (+Inf) is always "
        "there. Each bucket costs one line of /metrics per histogram, so fewer buckets leave room for more "
        "series.",
    )


@dataclass(frozen=True)
class Series:
    """Bounds on the number of time series that Prometheus has to store."""

    max: int = key(
        integer(1_000, 1_000_000),
        "10000",
        "Most lines that /metrics ever has, besides those for deadlocks and advised processes (305 at most). "
        "What gets no series of its own is counted in a series called `other`, so that totals stay exact. "
        "With many buckets and windows 1000 would leave room for no other series: lockd then asks for more, "
        "up to 1370.",
    )
    idle_ns: int = key(
        duration("1m", "30d"),
        "1h",
        "How long a series of a process that has ended is still exported after its last event. If other "
        "series need the room, it is exported for 30 s only.",
        reloads=True,
    )
    top_locks: int = key(
        integer(1, 10_000),
        "50",
        "Most locks of user space, and most sites of kernel locks, that have series of their own: those that "
        "are contended most at the time. Holders and causes have four times as many series.",
    )


ENTRIES_OF_CPU, MB = 512, 1_000_000
FEWEST_ENTRIES, FEWEST_THREADS, MOST_AUTO = 8192, 16_384, 262_144
"""The least that `auto` stands for in maps.entries, the least in maps.threads, and the most in both."""


def _power_of_two_near(number: int, least: int) -> int:
    return 1 << round(math.log2(min(max(number, least), MOST_AUTO)))


@dataclass(frozen=True)
class Maps:
    """Sizes of the BPF maps in the kernel, which take their memory whether they are used or not: with
    `auto` 22 MB on up to 16 processors with up to 16 GB (docs/performance.md). More than `auto` ever takes
    may need a larger MemoryMax= in the unit. Events that find a map full are counted in metrics, never lost
    silently."""

    entries: int = key(
        or_word(power_of_two(64, LARGEST_MAP), "auto", AUTO),
        "auto",
        "Entries of each program's map: combinations of thread and lock that have waits in one period. "
        "`auto` is about 512 for each processor that the host can have, from 8192 to 262144.",
    )
    threads: int = key(
        or_word(power_of_two(64, LARGEST_MAP), "auto", AUTO),
        "auto",
        "Threads that can wait at the same moment. `auto` is about one for each MB of the host's memory, "
        "from 16384 to 262144.",
    )
    stacks: int = key(
        power_of_two(64, LARGEST_MAP),
        "1024",
        "Call stacks that can be taken in the kernel in one period. A thread takes one for each kernel lock "
        "that it waits for, and more if its waits for that lock differ in type or length.",
    )

    def for_machine(self, cpus: int, memory_bytes: int) -> Maps:
        """The sizes with numbers in place of `auto`, for a machine with `cpus` possible processors."""
        return Maps(
            entries=self.entries or _power_of_two_near(cpus * ENTRIES_OF_CPU, FEWEST_ENTRIES),
            threads=self.threads or _power_of_two_near(memory_bytes // MB, FEWEST_THREADS),
            stacks=self.stacks,
        )


@dataclass(frozen=True)
class Names:
    """Names and kinds of locks. See docs/lock-names.md."""

    parked: tuple[str, ...] = key(
        list_of(glob(), "a list of names or shell patterns"),
        "[]",
        "Locks that idle threads wait for until there is work, by the value of the label `lock`, such as "
        '["pooled:gate", "*:idle_mutex"]. Some programs hold a lock to make a thread wait, and release it '
        "when there is work for the thread. Waits for these locks get the kind `cond`, like all waits for "
        "work, and cause no alert. lockd knows some of these locks by itself, such as Redis' "
        "io_threads_mutex.",
    )


@dataclass(frozen=True)
class Profile:
    """Samples: which code makes threads wait for locks (docs/holders.md), and the stacks of all waits off the
    CPU (docs/profiles.md)."""

    samples_per_second: int = key(
        integer(0, 500),
        "20",
        "How many releases of locks are sampled in a second, unless there are fewer, to find out which code "
        "held the lock. More of them make the shares of holders more exact, and cost CPU time of the namer. "
        "With 0 none is sampled, and no code for it runs in the kernel.",
    )
    waits_per_second: int = key(
        integer(0, 500),
        "20",
        "How many waits off the CPU are sampled in a second with the stacks of the thread that waits and of "
        "the one that wakes it, on a busy host; a quiet host has fewer. More of them make the profiles of "
        "waits more exact, and cost CPU time of the sampler and of the namer. With 0 none is sampled, and no "
        "code for it runs in the kernel.",
    )


@dataclass(frozen=True)
class Budget:
    """How much CPU time lockd may take. See docs/restraint.md."""

    cpu: float | None = key(
        or_none(or_word(share("0.01%", "100%"), "auto", AUTO), "none"),
        "auto",
        "Share of the CPU time of the whole machine for everything that lockd does by itself. While lockd "
        "takes more, it leaves out details step by step; totals stay exact. `auto` is 2%, or a fifth of "
        "one processor if that is more.",
        reloads=True,
    )
    requests: float | None = key(
        or_none(share("1%", "100%"), "none"),
        "25%",
        "Share of the CPU time of one processor for the tables and profiles that one client address asks "
        "for (all loopback addresses count as one). An address can save up 10 s of unused time. When "
        "that is used up, its requests are answered with status 429 (come back later). Scrapes of /metrics "
        "are not charged. See docs/web.md.",
        reloads=True,
    )

    def share(self, cpus: int) -> float | None:
        """The fraction of the CPU time of `cpus` processors that lockd may take; None for no limit."""
        return max(0.02, 0.2 / cpus) if self.cpu == AUTO else self.cpu


@dataclass(frozen=True)
class Web:
    """The web server for Prometheus and people."""

    listen: tuple[tuple[str, int], ...] = key(
        list_of(
            address(),
            "a list of different addresses, at least one",
            lambda addresses: bool(addresses) and len(set(addresses)) == len(addresses),
        ),
        '["127.0.0.1:9776"]',
        "Addresses to listen on; :9776 is every interface, by IPv4 and IPv6, and a host name is all of its "
        "addresses. Names of programs and locks can be private: without TLS and passwords, keep to the "
        "loopback address. The flag --web.listen-address overrides this key.",
    )
    config_file: Path | None = key(
        or_none(absolute_path(), "null"),
        "null",
        "File with TLS and passwords, in the format of the Prometheus exporters (exporter-toolkit); see "
        "docs/web.md. lockd reads the file again when it changes. The flag --web.config.file overrides "
        "this key.",
    )


@dataclass(frozen=True)
class Log:
    """Log messages of lockd itself."""

    level: str = key(
        choice("debug", "info", "warning", "error"),
        "info",
        "Severity of the least important messages that are logged. The flag --log.level overrides this key.",
        reloads=True,
    )


@dataclass(frozen=True)
class Config:
    """The whole configuration."""

    period_ns: int = key(
        duration("10ms", "10s"),
        "50ms",
        "Shortest time from one drain of the kernel's maps to the next; where little happens, drains are "
        "half a second apart. A shorter period costs more CPU time; with "
        "a longer one, more entries come together in one period, for which `maps` must have room.",
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
        "Spans of time over which the `max` metrics show the longest wait. The alerts that come with lockd "
        "use 1m. A reload can change the spans, but there can be no more of them than at the start.",
        reloads=True,
    )
    histogram: Histogram = section(Histogram)
    series: Series = section(Series)
    maps: Maps = section(Maps)
    names: Names = section(Names)
    profile: Profile = section(Profile)
    budget: Budget = section(Budget)
    web: Web = section(Web)
    log: Log = section(Log)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        least = self.fixed_lines + 4 * self._histogram_lines  # a process can have four histograms
        if self.series.max < least:
            yield (
                "series.max",
                f"leaves no room for series besides those called `other`; rule: {least} or more with these "
                "programs, buckets and windows",
            )

    @property
    def fixed_lines(self) -> int:
        """Lines of /metrics that no process and no lock can have: those about lockd, and of series called
        `other`.

        lockd/sample/ reserves them for each family of series, and may import nothing from here. A test
        compares the two.
        """
        futex, offcpu, kernel_locks = self.programs.futex, self.programs.offcpu, self.programs.kernel_locks
        histogram, gauges = self._histogram_lines, len(self.windows)
        sampled = 2 if self.profile.samples_per_second else 0  # a holder and a cause
        lines = OWN_LINES
        if futex.enabled:
            lines += 4 * (histogram + 1 + gauges) + 4 * (4 + gauges) + 2 * sampled + 1
            if futex.mode == "calls":
                lines += 4 + 2 + gauges + 16
        if offcpu.enabled:
            lines += 3 * (histogram + gauges) + histogram + 1
        if kernel_locks.enabled:
            lines += LOCK_TYPES * (histogram + 1 + gauges + 2 + sampled)
            if kernel_locks.mode == "all":
                lines += LOCK_TYPES_HELD * (histogram + 1)
        return lines

    @property
    def _histogram_lines(self) -> int:
        """Lines of one histogram: every bucket, +Inf, sum and count."""
        return len(self.histogram.buckets_us) + 3


def default() -> Config:
    """The configuration that applies without a file."""
    return Config()


def load(path: Path | None) -> Config:
    """The configuration in the file at `path`, or the defaults for None.

    Raises ConfigError, which lists everything that is wrong with the file.
    """
    return default() if path is None else read_file(Config, path)
