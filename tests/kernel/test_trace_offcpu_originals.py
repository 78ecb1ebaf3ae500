"""`lockd trace offcpu` and `offwake` beside the tools of bcc that they replace, on the same run.

The tools of bcc need kprobes. Their times include the run queue, as those of lockd do with --runqueue.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.bcc_headers import bcc_headers
from tests.support.checks import beside_another_tool, in_one_of_some_tries
from tests.support.lockd_process import ROOT
from tests.support.trace_process import one_shot
from tests.support.workload import Start

SHARE = 0.02
PER_WAIT_US = 1
"""The tolerance for each wait: the tools of bcc drop its fraction of a microsecond."""
K, SLEEP_US = 20, 40_000
KPROBES = Path("/sys/bus/event_source/devices/kprobe")
Blocks = list[list[str]]

pytestmark = beside_another_tool


@pytest.fixture(autouse=True)
def kprobes() -> None:
    if not KPROBES.exists():
        pytest.skip("host: no kprobes, which bcc's tools need")


class Original:
    """A tool of bcc."""

    def __init__(self, name: str, directory: Path, *arguments: object) -> None:
        given = ROOT / "originals" / name
        program = given if given.exists() else Path(shutil.which(f"{name}-bpfcc") or "")
        assert program.is_file(), "bpfcc-tools is not installed"
        environment = {**os.environ, **bcc_headers(directory), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            ["/usr/bin/python3", program, *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line.startswith("Tracing "):
            pytest.fail(f"{name}: {line}{self.process.communicate()[1]}")

    def stop(self) -> str:
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=120)[0]


@contextmanager
def original(name: str, directory: Path, *arguments: object) -> Iterator[Original]:
    tool = Original(name, directory, *arguments)
    try:
        yield tool
    finally:
        if tool.process.poll() is None:
            tool.process.kill()
            tool.process.wait()


def blocks_of(text: str) -> Blocks:
    blocks = [[line.strip() for line in part.splitlines() if line.strip()] for part in text.split("\n\n")]
    return [block for block in blocks if block]


def by_thread_and_stack(text: str) -> Counter[tuple[int, tuple[str, ...]]]:
    """Return the microseconds that offcputime prints, by thread and stack. The scheduler's own functions on
    top of a stack are left out.
    """
    sums: Counter[tuple[int, tuple[str, ...]]] = Counter()
    for *frames, who, value in blocks_of(text):
        thread = re.fullmatch(r"-\s+\S.* \((\d+)\)", who)
        assert thread, who
        # A function may have several names.
        names = tuple(re.sub(r"^__(do|x64|ia32)_sys_|\..*", "", frame) for frame in frames)
        first = names.index("__schedule") if "__schedule" in names else 0  # a new thread has none
        sums[int(thread[1]), names[first:]] += int(value)
    return sums


def by_target_and_waker(text: str) -> Counter[tuple[int, str]]:
    """Return the microseconds that offwaketime prints, by the thread that waited and the waker."""
    sums: Counter[tuple[int, str]] = Counter()
    for waker, *_, target, value in blocks_of(text):
        woken, who = (
            re.fullmatch(r"waker:\s*(.*?)( \d+)?", waker),
            re.fullmatch(r"target:\s+\S.* (\d+)", target),
        )
        assert woken, waker
        assert who, target
        sums[int(who[1]), woken[1]] += int(value)
    return sums


def differences(ours: int, theirs: int, what: object) -> list[str]:
    if theirs == pytest.approx(ours, rel=SHARE, abs=K * PER_WAIT_US):
        return []
    return [f"{what}: {ours} us, by bcc's {theirs} us"]


def test_offcputime_finds_the_same_stacks_and_times(workload: Start, tmp_path: Path) -> None:
    tries = iter(range(100))

    def attempt() -> list[str]:
        directory = tmp_path / str(next(tries))
        directory.mkdir()
        one = workload("stacked_waits", K, SLEEP_US)
        with (
            original("offcputime", directory, "-K", "-p", one.pid) as theirs,
            one_shot("offcpu", "-K", "-p", one.pid, "--runqueue", "--no-ongoing") as ours,
        ):
            truth = one.run()
            mine, its = by_thread_and_stack(ours.stop()), by_thread_and_stack(theirs.stop())
        one.finish()
        tids = {place["tid"] for place in truth["places"]}
        found = []
        for tid in tids:
            (stack, longest), *_ = Counter({s: us for (t, s), us in mine.items() if t == tid}).most_common()
            if not its[tid, stack]:
                others = "\n".join(";".join(s) for (t, s) in its if t == tid)
                pytest.fail(f"{';'.join(stack)}\nis not among\n{others}")
            found += differences(longest, its[tid, stack], stack)
        return found

    in_one_of_some_tries(attempt)


def test_offwaketime_finds_the_same_wakers_and_times(workload: Start, tmp_path: Path) -> None:
    tries = iter(range(100))

    def attempt() -> list[str]:
        directory = tmp_path / str(next(tries))
        directory.mkdir()
        one = workload("stacked_waits", K, SLEEP_US)
        with (
            original("offwaketime", directory, "-K", "-p", one.pid) as theirs,
            one_shot("offwake", "-K", "-p", one.pid, "--runqueue", "--no-ongoing") as ours,
        ):
            truth = one.run()
            mine, its = by_target_and_waker(ours.stop()), by_target_and_waker(theirs.stop())
        one.finish()
        sleep, pipe, fork = (place["tid"] for place in truth["places"])
        found = []
        for tid in (pipe, fork):
            found += differences(mine[tid, one.comm], its[tid, one.comm], (tid, "woken by its own process"))
        # offwaketime takes for the waker of a timer the thread that ran when the timer fired.
        all_theirs = sum(us for (tid, _), us in its.items() if tid == sleep)
        timer = sum(us for (tid, waker), us in mine.items() if tid == sleep and waker == "[interrupt]")
        return [*found, *differences(timer, all_theirs, "woken by a timer")]

    in_one_of_some_tries(attempt)
