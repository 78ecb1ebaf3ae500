"""Output formats for the times of mutexes: histograms as bpftrace prints them, table, CSV, JSON, profile."""

from __future__ import annotations

import json
from collections.abc import Iterator

from lockd.trace.core.histogram import bars, buckets
from lockd.trace.core.output import TABLE_FRAMES, aligned, csv_line, stack_field
from lockd.trace.mutex.times import Key, Measurement, Times
from lockd.views.profile import Mark, Profile, Sample, Value

NUMBERS = 6
"""The number of columns at the start of the table that are right-aligned."""
COLUMNS = (
    "pid", "comm", "address", "lock", "count", "total_ns", "max_ns", "errors", "state", "stack",
)  # fmt: skip


def _sorted(times: Times) -> list[tuple[Key, Measurement]]:
    """Measurements in the order of bpftrace's output: the largest sum is last, where a terminal shows it."""
    return sorted(
        times.items(),
        key=lambda item: (item[1].total, item[1].times.count, item[0].lock, item[0].comm, item[0].frames),
    )


def as_histograms(times: Times, name: str) -> Iterator[str]:
    """Lines as bpftrace prints maps: counts of failed calls, then a histogram of times for each measurement.

    A count has the form `@failed[lock, stack, comm, error]: count`. Each histogram begins with
    `@NAME[lock, stack, comm]:`, where NAME is `name`.
    """
    has_pids = len({key.pid for key in times}) > 1
    for key, measurement in _sorted(times):
        for error, count in sorted(measurement.errors.items()):
            yield f"@failed[{_bpftrace_key(key, has_pids, error)}]: {count}\n\n"
    for key, measurement in _sorted(times):
        if measurement.times.counts:
            yield f"@{name}[{_bpftrace_key(key, has_pids, key.state)}]: \n"
            yield from bars(measurement.times)
            yield "\n"


def _bpftrace_key(key: Key, has_pids: bool, more: str) -> str:
    """The key as bpftrace prints it, including blanks at the ends of lines. `more` is an error or a state."""
    stack = "".join(f"\n    {function}" for function in key.frames) + "\n" if key.frames else ""
    pid = f", pid {key.pid}" if has_pids else ""
    return f"{key.lock}, {stack}{', ' if stack else ''}{key.comm}{pid}{more and f', {more}'}"


def as_table(times: Times) -> Iterator[str]:
    """The lines of a table with times in microseconds, the largest sum first."""
    heads = ("COUNT", "TOTAL_US", "MEAN_US", "MAX_US", "ERRORS", "PID", "COMM", "LOCK", "STACK")
    rows: list[tuple[str, ...]] = [heads]
    for key, measurement in reversed(_sorted(times)):
        histogram = measurement.times
        mean = measurement.total / histogram.count if histogram.count else 0
        stack = " < ".join((*(f"[{text}]" for text in (key.state,) if text), *key.frames[:TABLE_FRAMES]))
        times_ns = measurement.total, mean, histogram.max or 0
        rows.append((
            str(histogram.count), *(f"{ns / 1000:.1f}" for ns in times_ns),
            str(sum(measurement.errors.values())), str(key.pid), key.comm, key.lock, stack,
        ))  # fmt: skip
    yield from aligned(rows, NUMBERS)


def as_csv(times: Times) -> Iterator[str]:
    """CSV lines, the largest sum first.

    Text is quoted. Stacks are as stack_field() returns them.
    """
    yield ",".join(COLUMNS) + "\n"
    for key, measurement in reversed(_sorted(times)):
        stack = stack_field(reversed(key.frames))
        cells = (
            key.pid, key.comm, f"{key.mutex:#x}", key.lock, measurement.times.count, measurement.total,
            measurement.times.max or 0, sum(measurement.errors.values()), key.state, stack,
        )  # fmt: skip
        yield csv_line(cells, quote_texts=True)


def as_json(times: Times) -> Iterator[str]:
    """A JSON object for each measurement, on a line of its own, the largest sum first."""
    for key, measurement in reversed(_sorted(times)):
        yield json.dumps({
            "pid": key.pid, "comm": key.comm, "address": f"{key.mutex:#x}", "lock": key.lock,
            "stack": list(reversed(key.frames)), "state": key.state, "unit": "ns",
            "count": measurement.times.count, "sum": measurement.total, "max": measurement.times.max or 0,
            "errors": measurement.errors, "buckets": buckets(measurement.times),
        }) + "\n"  # fmt: skip


def as_profile(times: Times, title: str, value: str, began: float, seconds: float) -> Profile:
    """The times as a profile, whose samples are of all threads of a process with one comm.

    In each stack, the mutex and the state are frames after the innermost function.

    `value` is the name of the first value, `wait` or `held`. `began` is the start of the trace in seconds
    since 1970, `seconds` its duration.
    """
    profile = Profile(title, (Value(value, "nanoseconds"), Value("calls", "count")), [], began, seconds)
    for key, measurement in times.items():
        if measurement.times.counts:
            marks = [Mark(f"[{text}]") for text in (key.lock, key.state) if text]
            labels = {"lock": key.lock} | ({"state": key.state} if key.state else {})
            profile.samples.append(
                Sample(
                    key.comm, key.pid, 0, (*reversed(key.frames), *marks),
                    (measurement.total, measurement.times.count), labels,
                )
            )  # fmt: skip
    return profile
