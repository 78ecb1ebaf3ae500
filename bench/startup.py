"""Measure how soon lockd is ready, and how much memory it takes then, at rest and under churn.

`sudo .venv/bin/python -m bench.startup [--quick] [--starts N] [--idle SECONDS] [--churn MINUTES]` writes
bench/build/startup.json and .md. The first start compiles the BPF programs; the others find them in the
cache. The churn consists of processes and threads that live for milliseconds, and of lock addresses that
nobody has seen before (tests/workloads). `--churn 60` shows whether anything grows. The proportional set size
(PSS) of a process depends on which other processes have mapped the same pages; its anonymous memory does not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench import results
from bench.cost import TICK, Memory, children_of, cpu_seconds, memory, pids_of
from lockd.config.schema import FEWEST_ENTRIES, FEWEST_THREADS, default
from lockd.service.start import load_settings
from tests.support.lockd_process import Lockd
from tests.support.workload import Workload

ROOT = Path(__file__).resolve().parents[1]

READY_TARGET, PSS_TARGET = 1.5, 60
"""The most seconds from a start to READY, and the most memory of all processes at rest, as PSS in MB."""
MAPS_BYTES, ENTRY_BYTES, THREAD_BYTES, CPU_BYTES = 18.4e6, 994, 148, 140e3
"""The bytes that all maps may take with the fewest entries and threads, and the bytes that each further entry
and thread, and each processor, may add."""
SCRAPED_EVERY = 15.0
PROCESSES = ("sampler", "namer", "exporter")
LOADER_LOOK = 0.01
CHURN = (("fork_storm", 500), ("clone_churn", 5000), ("many_addrs", 2000, 200, 0))
"""Workloads with their arguments. One round of all of them takes about a second."""
MB = 1e6


@dataclass
class Start:
    """The figures of one start of a daemon. Times are seconds from the start of its process."""

    is_first: bool
    tick: float = 0.0
    ready: float = 0.0
    cpu: float = 0.0
    """CPU seconds of all processes until READY, ended ones included. The host's other load is not in it."""
    loader_peak: int = 0
    """The peak of the loader's resident memory, in bytes."""
    loader_is_gone: bool = False
    memory: dict[str, Memory] = field(default_factory=dict)
    """Memory by the name of the process, right after READY. The namer may still be starting then."""


class Notifications:
    """The socket on which a service tells systemd that it is ready (sd_notify(3)), and the time of that."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.settimeout(30)

    def ready(self) -> float:
        """Wait for the message READY=1, and return its time by the monotonic clock.

        The time is taken when the message is read. So this has to be called before the service is ready.
        """
        while not self._socket.recv(4096).startswith(b"READY=1"):
            pass
        return time.monotonic()

    def close(self) -> None:
        self._socket.close()


class LoaderPeak:
    """A thread that looks for the loader every LOADER_LOOK seconds, and notes the peak of its memory."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        """Look among all descendants: the loader is a grandchild, and nobody else here starts one."""
        while not self._stopped.wait(LOADER_LOOK):
            for pid in _descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    if b"lockd.load" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        text = Path(f"/proc/{pid}/status").read_text()
                        if peak := re.search(r"^VmHWM:\s*(\d+)", text, re.MULTILINE):
                            self.bytes = max(self.bytes, int(peak[1]) * 1024)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


@contextlib.contextmanager
def started(cache: Path, is_first: bool) -> Iterator[tuple[Lockd, Start]]:
    """Start a daemon with the default configuration. The context begins once it is ready."""
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.closing(Notifications(Path(directory))) as said,
        contextlib.closing(LoaderPeak()) as loader,
    ):
        start = Start(is_first)
        moments: list[float] = []
        waiting = threading.Thread(target=lambda: moments.append(said.ready()), daemon=True)
        waiting.start()
        environment = {**os.environ, "NOTIFY_SOCKET": str(said.path), "CACHE_DIRECTORY": str(cache)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed lockd has compiled Python files
        began, wall = time.monotonic(), time.time()
        daemon = Lockd(Path(directory), env=environment)
        try:
            waiting.join()
            start.cpu = cpu_of(daemon)
            start.memory = memory_of(daemon)
            start.ready = moments[0] - began
            loader.close()
            start.loader_peak = loader.bytes
            commands = children_of(daemon.process.pid).values()
            start.loader_is_gone = not any("lockd.load" in command for command in commands)
            # The first tick follows at once after lockd_start_time_seconds.
            start.tick = daemon.metrics(settled=False).sum("lockd_start_time_seconds") - wall
            yield daemon, start
        finally:
            if (code := daemon.stop()) != 0:
                raise RuntimeError(f"lockd ended with code {code}:\n" + "".join(daemon.log))


def cpu_of(daemon: Lockd) -> float:
    """CPU seconds of the daemon's processes, and of the ended child that it has waited for, the loader."""
    sampler = daemon.process.pid
    waited_for = Path(f"/proc/{sampler}/stat").read_text().rpartition(")")[2].split()[13:15]
    living = sum(cpu_seconds(pid) for pid in (sampler, *children_of(sampler)))
    return living + sum(map(int, waited_for)) / TICK


def memory_of(daemon: Lockd) -> dict[str, Memory]:
    """The memory of each process of the daemon that runs now, by the name of the process."""
    pids = pids_of(daemon.process.pid)
    return {name: memory(pids[name]) for name in PROCESSES if name in pids}


def maps_bytes(pid: int) -> dict[int, int]:
    """The bytes of kernel memory of each BPF map that a process has open, by the id of the map."""
    found = {}
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            about = dict(re.findall(r"^(map_id|memlock):\s*(\d+)", file.read_text(), re.MULTILINE))
            if "map_id" in about:
                found[int(about["map_id"])] = int(about["memlock"])
    return found


def maps_target() -> float:
    """The bytes that all maps may take with the default configuration on this host."""
    settings = load_settings(default())
    more = settings.entries - FEWEST_ENTRIES, settings.threads - FEWEST_THREADS
    return MAPS_BYTES + more[0] * ENTRY_BYTES + more[1] * THREAD_BYTES + settings.cpus * CPU_BYTES


@dataclass
class Later:
    """The figures of a daemon that stays up.

    `maps` has the bytes of each map by its id. `idle` has the memory of each process at rest. `churn` has the
    memory of each process at several times, which are in seconds since the churn began.
    """

    maps: dict[int, int]
    idle: dict[str, Memory] = field(default_factory=dict)
    churn: list[tuple[float, dict[str, Memory]]] = field(default_factory=list)
    rounds: int = 0
    dropped: float = 0.0


def stay(daemon: Lockd, idle: float, churn: float) -> Later:
    """Scrape a daemon for `idle` seconds at rest and `churn` seconds under churn; return the figures."""
    later = Later(maps_bytes(daemon.process.pid))
    began = time.monotonic()
    while time.monotonic() < began + idle:
        daemon.get("/metrics")
        time.sleep(min(SCRAPED_EVERY, idle))
    later.idle = memory_of(daemon)
    began = time.monotonic()
    while (now := time.monotonic() - began) < churn:
        for name, *arguments in CHURN:
            one = Workload(name, *arguments, comm=f"churn{later.rounds % 1000}")
            one.run()
            one.finish()
        later.rounds += 1
        if not later.churn or now >= later.churn[-1][0] + SCRAPED_EVERY:
            daemon.get("/metrics")
            later.churn.append((now, memory_of(daemon)))
    later.churn.append((now, memory_of(daemon)))
    later.dropped = daemon.metrics().dropped
    return later


def report(starts: list[Start], later: Later) -> Iterator[str]:
    """Yield the report as Markdown."""
    first, others = starts[0], starts[1:]
    yield "# Start-up and memory\n\n"
    yield f"{len(others)} starts after the first. Medians (least to most).\n\n"
    yield "| | first start, compiles | later starts |\n|---|---:|---:|\n"
    for what, name, unit, scale in (
        ("to the first tick", "tick", "s", 1),
        ("to READY", "ready", "s", 1),
        ("CPU time until then, all processes", "cpu", "s", 1),
        ("peak of the loader", "loader_peak", "MB", MB),
    ):
        each = [getattr(start, name) / scale for start in others]
        spread = f"{statistics.median(each):.2f} {unit} ({min(each):.2f} to {max(each):.2f})"
        yield f"| {what} | {getattr(first, name) / scale:.2f} {unit} | {spread} |\n"
    gone = sum(start.loader_is_gone for start in starts)
    yield f"| loader gone at READY | | {gone} of {len(starts)} |\n"
    yield "\n| memory in MB: share of it (PSS), of that anonymous, resident | " + " | ".join(PROCESSES)
    yield " | all (PSS) |\n|---|" + "---:|" * (len(PROCESSES) + 1) + "\n"
    moments = [("at READY, the last start", starts[-1].memory), ("at rest", later.idle)]
    chosen = sorted({0, len(later.churn) // 4, len(later.churn) // 2, len(later.churn) - 1})
    moments += [(f"after {later.churn[at][0] / 60:.1f} min of churn", later.churn[at][1]) for at in chosen]
    for when, by_process in moments:
        cells = [_cell(by_process.get(name)) for name in PROCESSES]
        yield f"| {when} | {' | '.join(cells)} | {_all(by_process):.1f} |\n"
    yield f"\nChurn: {later.rounds} rounds; events dropped: {later.dropped:.0f}.\n\n"
    yield "| what | target | measured | holds |\n|---|---:|---:|---|\n"
    ready = statistics.median(start.ready for start in others)
    for what, limit, found, unit in (
        ("start to READY, programs kept", READY_TARGET, ready, "s"),
        ("proportional memory at rest, all processes", PSS_TARGET, _all(later.idle), "MB"),
        ("maps at the defaults", round(maps_target() / MB, 1), sum(later.maps.values()) / MB, "MB"),
    ):
        holds = "yes" if found <= limit else "**no**"
        yield f"| {what} | ≤ {limit:g} {unit} | {found:.2f} {unit} | {holds} |\n"


def _cell(memory: Memory | None) -> str:
    if not memory:
        return ""
    return f"{memory.share / MB:.1f}, {memory.anonymous / MB:.1f}, {memory.resident / MB:.1f}"


def _all(by_process: dict[str, Memory]) -> float:
    return sum(memory.share for memory in by_process.values()) / MB


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and short, to see that all works")
    parser.add_argument("--starts", type=int, help="after the first; default: 5")
    parser.add_argument("--idle", type=float, help="seconds at rest; default: 60, before the namer ends")
    parser.add_argument("--churn", type=float, help="minutes of it; default: 3")
    args = parser.parse_args()
    count = args.starts or (2 if args.quick else 5)
    idle = args.idle if args.idle is not None else 5 if args.quick else 60
    churn = 60 * (args.churn if args.churn is not None else 0.2 if args.quick else 3)
    subprocess.run(["make", "-s", "-C", ROOT / "tests/workloads"], check=True)
    host = results.host()
    starts: list[Start] = []
    with tempfile.TemporaryDirectory() as cache:
        for number in range(count + 1):
            with started(Path(cache), is_first=number == 0) as (daemon, start):
                starts.append(start)
                print(f"start {number}: READY after {start.ready:.2f} s", file=sys.stderr, flush=True)
                if number == count:
                    later = stay(daemon, idle, churn)
    data = {"host": host, "starts": [asdict(one) for one in starts], "later": asdict(later)}
    text = "".join(report(starts, later))
    results.write("startup", data, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
