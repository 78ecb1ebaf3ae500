"""Compare the daemon's sampled profile of waits off the CPU with a trace that counts every wait.

`python -m bench.wait_profiles` writes bench/build/wait_profiles.json and .md. The daemon and
`lockd trace offcpu` look at the same minute of each load. The report has the shares of the stacks with most
time in the trace, as both see them, the largest difference between the two, the total time in both, and what
the daemon's processes took of a processor.

The trace captures more of each stack. So a stack of the daemon that ends before one of the trace counts as
that one. A stack ends for both at its first frame of code without names, because what follows is a guess.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import results
from bench.database import database
from bench.host import say
from bench.idle import taken_by_processes
from tests.support.lockd_process import CHECKOUT, Lockd

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 20
"""The number of stacks that are compared: those with most time in the trace."""
NAMELESS = "[jit]"
SETTLE_SECONDS = 5.0
BUILDERS = 4
BUILDERS_COMMS = "make|sh|cc|gcc|cc1|as|collect2|ld|rm|mkdir"
"""The names of the processes of a build."""
THREADS = 16
"""The number of connections to the database."""

Stack = tuple[str, ...]
Times = dict[Stack, float]
"""Microseconds by stack, innermost function first."""


@contextlib.contextmanager
def mariadb(directory: Path) -> Iterator[str]:
    """A database under load; yields a regular expression for the comms of its processes, as others do."""
    socket = directory / "socket"
    sysbench = ["sysbench", "oltp_read_write", f"--mysql-socket={socket}", "--mysql-user=root",
                "--tables=4", "--table-size=20000", f"--threads={THREADS}", "--time=0"]  # fmt: skip
    with database(socket):
        query = ["mariadb", "--no-defaults", f"--socket={socket}", "-e", "CREATE DATABASE sbtest"]
        subprocess.run(query, check=True)
        subprocess.run([*sysbench, "prepare"], check=True, stdout=subprocess.DEVNULL)
        with running([*sysbench, "run"]):
            yield "mariadbd"


@contextlib.contextmanager
def java(directory: Path) -> Iterator[str]:
    with running(["java", "-Xmx128m", ROOT / "bench/programs/Pools.java"]):
        yield "java"


@contextlib.contextmanager
def build(directory: Path) -> Iterator[str]:
    """A build: the workloads of the tests are compiled again and again."""
    shutil.copytree(ROOT / "tests/workloads", directory / "source", ignore=shutil.ignore_patterns("build"))
    command = f"while :; do make -s -j{BUILDERS} -C {directory / 'source'} clean all; done"
    with running(["bash", "-c", command]):
        yield BUILDERS_COMMS


LOADS: dict[str, Callable[[Path], contextlib.AbstractContextManager[str]]] = {
    "MariaDB": mariadb,
    "Java": java,
    "build": build,
}


@contextlib.contextmanager
def running(command: list[str | Path]) -> Iterator[None]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], start_new_session=True, **quiet)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def stacks_of(source: str | Path, comms: str) -> Times:
    """Return the stacks in a pprof profile at a path or URL, of samples with one of these comms.

    In a trace these are names of threads, in the daemon's profile those of processes.
    """
    focus = f"-tagfocus=comm=^({comms})$"
    with tempfile.TemporaryDirectory() as kept:
        done = subprocess.run(
            ["go", "tool", "pprof", "-traces", "-unit=us", "-sample_index=0", focus, source],
            capture_output=True, text=True, check=True, timeout=300, env={**os.environ, "PPROF_TMPDIR": kept},
        )  # fmt: skip
    times: Times = defaultdict(float)
    for part in re.split(r"^-+\+-+$", done.stdout, flags=re.MULTILINE)[1:]:
        lines = [line for line in part.splitlines() if not re.match(r"\s*\w+:  ", line)]
        if not lines or not (first := re.match(r"\s*([\d.]+)us\s+(.*)$", "\n".join(lines).strip("\n"), re.S)):
            continue
        frames = [frame.strip() for frame in first[2].splitlines() if frame.strip()]
        times[tuple(frames)] += float(first[1])
    return times


def of_daemon(lockd: Lockd, comms: str, seconds: int) -> Times:
    """Return the daemon's profile of the next `seconds`.

    Its first and last frames are left out: the trace has no frames for the comm and the reason.
    """
    address = f"http://{lockd.address}/debug/pprof/offcpu?seconds={seconds}"
    times: Times = defaultdict(float)
    for frames, us in stacks_of(address, comms).items():
        times[up_to_nameless(frames[1:-1])] += us
    return times


def of_trace(path: Path, comms: str) -> Times:
    """Return the profile of the trace."""
    times: Times = defaultdict(float)
    for frames, us in stacks_of(path, comms).items():
        times[up_to_nameless(frames)] += us
    return times


def up_to_nameless(frames: Stack) -> Stack:
    """Return the frames up to the first one of code without names."""
    return frames[: frames.index(NAMELESS) + 1] if NAMELESS in frames else frames


def matched(sampled: Times, traced: Times) -> Times:
    """The times of the daemon by the stacks of the trace.

    A shorter stack counts as one that begins with it: the one with most time in the trace.
    """
    times: Times = defaultdict(float)
    for stack, us in sampled.items():
        longer = [other for other in traced if other[: len(stack)] == stack]
        times[max(longer, key=traced.__getitem__, default=stack)] += us
    return times


def compare(name: str, seconds: int, per_second: int) -> dict[str, object]:
    """Run a load, and compare what the daemon and the trace see of it."""
    with (
        tempfile.TemporaryDirectory(prefix="lockd-bench-", dir="/var/tmp") as own,
        contextlib.ExitStack() as ends,
    ):
        directory = Path(own)
        lockd = Lockd(directory, {"profile": {"waits_per_second": per_second}})
        ends.callback(lockd.stop)
        with LOADS[name](directory) as comms:
            time.sleep(SETTLE_SECONDS)
            pids = subprocess.run(["pgrep", "-x", comms], capture_output=True, text=True, check=False).stdout
            whose = ["-p", ",".join(pids.split())] if comms != BUILDERS_COMMS else []
            with subprocess.Popen(
                [*CHECKOUT, "trace", "offcpu", "--no-ongoing", "--format", "pprof", "-o", directory / "trace",
                 *whose, str(seconds + 2)], stderr=subprocess.DEVNULL,
            ):  # fmt: skip
                time.sleep(2)
                began, before = time.monotonic(), taken_by_processes(lockd)
                sampled = of_daemon(lockd, comms, seconds)
                passed, after = time.monotonic() - began, taken_by_processes(lockd)
        traced = of_trace(directory / "trace", ".*" if whose else comms)
        samples = lockd.metrics().sum("lockd_wait_samples_total")
    sampled = matched(sampled, traced)
    in_trace, in_daemon = sum(traced.values()), sum(sampled.values())
    largest = sorted(traced, key=traced.__getitem__, reverse=True)[:LARGEST]
    rows = [
        {
            "stack": stack,
            "traced": traced[stack] / in_trace,
            "sampled": sampled.get(stack, 0.0) / in_daemon,
        }
        for stack in largest
    ]
    return {
        "load": name,
        "traced_s": in_trace / 1e6,
        "sampled_s": in_daemon / 1e6,
        "samples": samples,
        "processor": {
            name: sum(ns - before[name].get(pid, 0) for pid, ns in of_one.items()) / 1e9 / passed
            for name, of_one in after.items()
        },
        "rows": rows,
    }


def as_text(found: list[dict[str, object]]) -> str:
    lines = ["# Sampled and traced waits", ""]
    for one in found:
        rows = one["rows"]
        assert isinstance(rows, list)
        processor = one["processor"]
        assert isinstance(processor, dict)
        took = ", ".join(f"{name} {share:.1%}" for name, share in processor.items())
        worst = max((abs(row["traced"] - row["sampled"]) for row in rows), default=0.0)
        lines += [
            f"## {one['load']}",
            "",
            f"{one['traced_s']:.1f} s in the trace, {one['sampled_s']:.1f} s in the profile;"
            f" {one['samples']:.0f} samples of all processes;"
            f" the largest difference is {100 * worst:.1f} points. Of one processor the daemon took: {took}.",
            "",
            "| traced | sampled | stack, innermost function first |",
            "|---|---|---|",
        ]
        for row in rows:
            stack = " < ".join(row["stack"][:10])
            lines.append(f"| {100 * row['traced']:.1f}% | {100 * row['sampled']:.1f}% | {stack} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--per-second", type=int, default=20, help="profile.waits_per_second")
    parser.add_argument("--loads", default=",".join(LOADS))
    args = parser.parse_args()
    found = []
    for name in args.loads.split(","):
        say(f"{name}: {args.seconds} s")
        found.append(compare(name, args.seconds, args.per_second))
    text = as_text(found)
    results.write("wait_profiles", {"host": results.host(), "loads": found}, text)
    print(text)


if __name__ == "__main__":
    main()
