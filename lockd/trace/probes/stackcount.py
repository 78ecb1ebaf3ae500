"""`lockd trace stackcount`: how often functions or tracepoints are reached, by stack."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

from lockd.errors import UsageError
from lockd.kernel.pairs import Entries
from lockd.load.settings import LoadSettings
from lockd.names.labels.processes import text
from lockd.trace.core import options, output
from lockd.trace.core.call_stacks import CallStacks
from lockd.trace.core.session import Session
from lockd.trace.probes import pattern_options
from lockd.trace.probes.patterns import Probes
from lockd.views.profile import Mark, Profile, Sample, Value

HELP = "Count how often functions or tracepoints are reached, by stack"
EPILOG = f"""\
{pattern_options.PATTERNS}
examples:
  lockd trace stackcount c:malloc -p 185 10           who allocates in process 185, for 10 s
  lockd trace stackcount 'vfs_*' -D 10 -P             calls of all these kernel functions, by process
  lockd trace stackcount t:sched:sched_switch -Ti 5   who leaves the CPU, every 5 s
  lockd trace stackcount -r '^tcp_send' -s            functions by a regular expression, with offsets
  lockd trace stackcount c:malloc -p 185 10 --flamegraph malloc.svg
"""
TITLE = "lockd trace stackcount"


def add_options(parser: argparse.ArgumentParser) -> None:
    pattern_options.add_options(parser, "PATTERN")
    options.add_duration(parser)
    parser.add_argument(
        "-D", "--duration", dest="long_duration", metavar="DURATION", type=options.seconds,
        help="another way to give the duration",
    )  # fmt: skip
    parser.add_argument(
        "-r", "--regexp", action="store_true",
        help="PATTERN, without OBJECT: or t:, is a regular expression that the beginning of names must match",
    )  # fmt: skip
    parser.add_argument(
        "-i", "--interval", metavar="TIME", type=options.seconds,
        help="print the counts after each TIME, each time from zero",
    )  # fmt: skip
    parser.add_argument(
        "-T", "--timestamp", action="store_true", help="print the time of day before the counts"
    )
    parser.add_argument("-P", "--perpid", action="store_true", help="count each process separately")
    parser.add_argument(
        "-d",
        "--delimited",
        action="store_true",
        help="put -- between the stacks of the kernel and of user space",
    )
    options.add_output(parser, options.PROFILE_FORMATS, "stacks")
    options.add_short_format(parser, "folded", "-f", "--folded")


def run(args: argparse.Namespace) -> int:
    _check(args)
    probes = pattern_options.resolve_probes(args, TITLE)
    settings = settings_of(args, probes)
    with Session(TITLE, settings, args.duration, args.pids, shown=pattern_options.shown(args)) as session:
        pattern_options.report_attached(session, probes)
        counts = _Counts(args, session.stacks)
        intervals = output.Intervals(args.interval)

        def count() -> None:
            for drained in session.windows():
                session.events += counts.add(drained)
                if not session.ended_ns and intervals.has_ended():
                    session.progress.end()
                    counts.write()
            counts.write(None if args.interval else session.elapsed)

        def report() -> None:
            pattern_options.report(session, probes)

        output.write_each([count, report])
    return 0


def settings_of(args: argparse.Namespace, probes: Probes) -> LoadSettings:
    """The loader's settings for these options."""
    return pattern_options.load_settings(
        args, probes, "count_stack", "trace/stackcount.bpf.c", ("stackcount",)
    )


def _check(args: argparse.Namespace) -> None:
    """Set `args.duration` to the value of -D if -D is given.

    Raises UsageError for options that contradict each other.
    """
    if args.long_duration and args.duration:
        raise UsageError("-D/--duration: the duration is given twice")
    args.duration = args.duration or args.long_duration
    if args.timestamp and args.format in ("json", "pprof"):
        raise UsageError(f"-T/--timestamp: --format {args.format} has no place for it; rule: a text format")
    if args.interval and (args.format == "pprof" or args.flamegraph):
        raise UsageError(
            "-i/--interval: a profile or flame graph is about the whole trace; rule: a text format"
        )


class _Counts:
    """Numbers of events by process and stack, counted since the last call of write()."""

    def __init__(self, args: argparse.Namespace, stacks: CallStacks) -> None:
        self._args = args
        self._stacks = stacks
        self._counts: dict[tuple[str, int, int, int], int] = {}
        self._began = time.time()
        self._was_written = False

    def add(self, drained: dict[str, Entries]) -> int:
        """Add the entries of a window. Returns the number of events in them."""
        if "stackcount" not in drained:
            return 0
        keys, values = drained["stackcount"]
        numbers, who = keys["stacks"], values["who"]
        for user, kernel, count, tgid, comm in zip(
            numbers["user"].tolist(), numbers["kernel"].tolist(), values["count"].tolist(),
            who["tgid"].tolist(), who["comm"].tolist(), strict=True,
        ):  # fmt: skip
            key = text(comm), tgid, user, kernel
            self._counts[key] = self._counts.get(key, 0) + count
        return int(values["count"].sum())

    def write(self, seconds: float | None = None) -> None:
        """Write the counts in the format that the user asked for, and start again from zero.

        `seconds` is how long events were counted, by default the time since the previous call of write().
        """
        now = time.time()
        profile = Profile(
            TITLE, (Value("count", "count"),), list(self._samples()), self._began,
            now - self._began if seconds is None else seconds,
        )  # fmt: skip

        def write_heading() -> None:
            heading = time.strftime("%H:%M:%S\n", time.localtime(now))
            output.write_text(self._args.output, [heading], self._was_written)
            self._was_written = True

        def write_counts() -> None:
            write(self._args, profile, self._was_written)

        has_heading = self._args.timestamp and not output.is_only_graph(self._args)
        output.write_each([write_heading, write_counts] if has_heading else [write_counts])
        self._counts.clear()
        self._began, self._was_written = now, True

    def _samples(self) -> Iterator[Sample]:
        """A sample for each process and stack of functions; each is of all threads of the process."""
        sums: dict[tuple[str, int, tuple[str, ...]], int] = {}
        mark = Mark("-" if self._args.format == "folded" else "--")
        has_both_sides = not (self._args.user_stacks_only or self._args.kernel_stacks_only)
        delimiter = (mark,) if self._args.delimited and has_both_sides else ()
        for (comm, tgid, user, kernel), count in self._counts.items():
            users, kernels = self._stacks.user(user), self._stacks.kernel(kernel)
            key = comm, tgid, (*reversed(users), *delimiter, *reversed(kernels))
            sums[key] = sums.get(key, 0) + count
        for (comm, tgid, frames), count in sums.items():
            yield Sample(comm, tgid, 0, frames, (count,))


def write(args: argparse.Namespace, profile: Profile, is_more: bool = False) -> None:
    """Write counts by process and stack as the options say; with `is_more`, append them to the file.

    The format `folded` and flame graphs have no process ids, so processes of the same name would be added up.
    With -P the name of the process therefore contains the id.
    """
    others = {"stacks": _multiline(args.perpid, profile)}
    if not args.perpid:
        output.write(args, profile, others, is_more)
        return
    samples = [replace(one, comm=f"{one.comm} [{one.pid}]") for one in profile.samples]
    by_process = replace(profile, samples=samples)
    output.write(args, profile, {**others, "folded": output.folded(by_process)}, is_more, by_process)


def _multiline(is_per_process: bool, profile: Profile) -> Iterator[str]:
    """Each stack with the innermost function first, then the process if `is_per_process`, then the count.

    The kernel's functions come before those of user space.
    """
    sums: dict[tuple[tuple[str, ...], str], int] = {}
    for sample in profile.sorted():
        key = sample.frames, f"    {sample.comm} [{sample.pid}]\n" if is_per_process else ""
        sums[key] = sums.get(key, 0) + sample.values[0]
    for (frames, process), count in sorted(sums.items(), key=lambda item: (item[1], item[0])):
        yield from (f"{'    ' if isinstance(frame, Mark) else '  '}{frame}\n" for frame in reversed(frames))
        yield f"{process}    {count}\n\n"
