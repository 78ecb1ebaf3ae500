"""The session of a one-shot tool, which attaches the programs, drains their maps, and detaches the programs.

A session also watches the traced processes, collects call stacks, and shows its progress on standard error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TextIO

import numpy as np

from lockd.errors import HostError, UsageError
from lockd.kernel.counters import Losses, program_info
from lockd.kernel.maps import HashMap
from lockd.kernel.pairs import Entries, Pairs
from lockd.kernel.rings import Ring
from lockd.load.child import raise_descriptor_limit, run_loader
from lockd.load.settings import LoadSettings
from lockd.names.blocked_processes import BlockedProcesses
from lockd.names.stacks import FUNCTIONS, FrameFormat
from lockd.printable import printable
from lockd.trace.core.call_stacks import KEPT, CallStacks

PERIOD = 0.05
"""Seconds between two drains of the maps."""
PROGRESS_SECONDS = 0.2
"""Seconds between two updates of the progress line, while tracing and while stacks are named at the end."""
UNWIND_SECONDS = 0.002
"""Seconds of unwinding after which new processes are examined again, as they may end at any moment."""
MOST_HOOKS_REPORTED = 10
"""Of the hooks that could not be attached, the most that are reported one by one."""
STACK_DEFINES = {"WITH_USER_STACKS", "WITH_KERNEL_STACKS"}
"""The macros with which load_settings() of lockd/trace/core/options.py asks for stacks."""
EXAMINED_AT_ONCE = 64
"""The most threads that are looked up in procfs after each drain to find out whether they have ended."""
BLOCKED_PROCESSES = "blocked_processes"
"""The ring buffer in which the programs announce processes of which they have just captured a stack."""
TRACED_PROCESSES, TRACED_THREADS = "traced_processes", "traced_threads"
"""The maps with the ids of the processes and threads to trace (lockd/bpf/include/trace.bpf.h)."""
OF_A_THREAD = (errno.EINVAL, errno.ENOENT)
"""The errnos of pidfd_open() for the id of a thread that is not the main thread of its process. Which of them
it is depends on the kernel."""
OLDER_WAITS_LOST = "older waits: threads full"
"""The key in losses() for waits that began before the trace and found no room in the map of threads."""
OLDER_WAITS_UNREADABLE = "older waits: not readable"
"""The key in losses() for threads that waited when the trace began, and whose system calls the kernel refuses
to show."""


class Session:
    """A context manager: entering it attaches the programs of `settings`, leaving it detaches all of them.

    The trace ends after `duration` seconds (None: no limit), on SIGINT, SIGTERM or stop(), or when all
    processes `only` and all `threads` have ended, if any are given. `title` begins every message of the
    session. `others` names the maps of the tool that are not hash maps; the tool reads these itself.
    `optional` names the parts (Part.what in lockd/load/hooks.py) without which the tool can work. `shown`
    says what is printed of each stack frame.
    """

    def __init__(
        self,
        title: str,
        settings: LoadSettings,
        duration: float | None = None,
        only: Iterable[int] = (),
        threads: Iterable[int] = (),
        others: tuple[str, ...] = (),
        optional: tuple[str, ...] = (),
        shown: FrameFormat = FUNCTIONS,
    ) -> None:
        self.title = title
        self._settings = settings
        self._duration = duration
        self._only, self._threads = tuple(only), tuple(threads)
        self._others, self._optional = others, optional
        self._stopped = False
        self.events = 0
        """Number of events so far, as the tool counts them; for messages only."""
        self.progress = Progress(sys.stderr)
        self.stacks = CallStacks(shown)
        """The call stacks of all windows that were drained so far."""
        self.own_losses: Counter[str] = Counter()
        """Numbers of events that the tool itself has lost, by description, as in losses()."""
        self._has_stacks = bool(settings.trace and STACK_DEFINES & settings.trace.defines.keys())
        self._lost_before: dict[str, int] = {}
        """What _read_losses() returned before the trace began."""
        self._lost: dict[str, int] | None = None
        """What _read_losses() returned at the end of the trace; None while the trace goes on."""
        self.ended_ns = 0
        """Nanoseconds of CLOCK_MONOTONIC at which detaching began; 0 before that."""

    def __enter__(self) -> Session:
        """Raises UsageError if a process or thread does not exist, HostError if a part that is not optional
        cannot be attached."""
        raise_descriptor_limit(self._settings, len(self._only))
        with contextlib.ExitStack() as opened:
            self._lifetimes = Lifetimes(self._only, self._threads, opened)
            self.progress.show_text(f"{self.title}: attaching")
            opened.callback(self.progress.end)
            if self._has_stacks:
                self.stacks.names.load_files(self._only)
            self.manifest, fds = run_loader(self._settings)
            maps = len(self.manifest.maps)
            functions = maps + len(self.manifest.functions)
            self._functions, self._attached = fds[maps:functions], fds[functions:]
            opened.callback(self._detach)
            opened.callback(_close, fds[:functions])
            self._report_missing_hooks()
            self.fds = dict(zip((info.name for info in self.manifest.maps), fds, strict=False))
            """File descriptors of the maps, by map name."""
            self._pairs = Pairs(self.manifest, fds, (BLOCKED_PROCESSES, *self._others))
            self._losses = Losses(self.manifest, self._pairs.losses)
            self._new_processes = self._open_new_processes()
            for map_, ids in self._traced_ids():
                for number in ids:
                    map_.update(np.array([number], np.uint32), np.array([1], np.uint8))
            # While hooks are attached one after another, the kernel may skip runs of programs already, and
            # programs may count beginnings without ends. Nothing of the trace is lost by that.
            self._lost_before = self._read_losses()
            self._pairs.control.set_tracing(True)  # only now that every hook is attached
            self.began_ns, self._began = time.monotonic_ns(), time.monotonic()
            self.began_at = time.time()
            """When attaching ended, in seconds since 1970."""
            # Handlers are set last: a signal during attaching ends the command at once, as there is no
            # result to print.
            for number in (signal.SIGINT, signal.SIGTERM):
                opened.callback(signal.signal, number, signal.signal(number, self._on_signal))
            self._opened = opened.pop_all()
        self.progress.announce(f"{self.title}: tracing")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    @property
    def elapsed(self) -> float:
        """Seconds from the end of attaching until the beginning of detaching, or until now if detaching has
        not begun."""
        return ((self.ended_ns or time.monotonic_ns()) - self.began_ns) / 1e9

    def windows(self) -> Iterator[dict[str, Entries]]:
        """Yield the entries of each window, by the name of their pair; pairs without entries are left out.

        After the trace has ended, the iterator detaches the programs, yields the last two windows, unwinds
        all stacks, and clears the progress line.
        """
        due = self._began
        while not self._is_over():
            due = max(due + PERIOD, time.monotonic())
            self.wait(due if self._duration is None else min(due, self._began + self._duration))
            yield self._drain()
            self._unwind(min(due, time.monotonic()) + PERIOD / 2)
            self._forget_ended()
            if self.progress.is_due:
                self.progress.show_counts(self.elapsed, self.events, self.lost_events)
        # From here on, no program counts anything that begins. The programs are detached one after another,
        # which can take a minute. Until then they count at most the ends of what began before.
        self._pairs.control.set_tracing(False)
        self.progress.show_text(f"{self.title}: detaching")
        # Losses are read before detaching. While hooks are detached one after another, programs may see a
        # beginning without its end, or the reverse. They count that as a loss, although nothing is missing.
        self._lost = self._read_losses()
        self._detach()
        for _ in range(2):
            yield self._drain()
        self._name_stacks()
        self.progress.end()

    def wait(self, until: float) -> None:
        """Wait until time.monotonic() reaches `until`, or until a signal or stop() ends the trace.

        New processes are examined during the wait, as soon as the programs announce them.
        """
        while not self._stopped and (left := until - time.monotonic()) > 0:
            self._examine_new_processes(min(left, PERIOD))

    def _unwind(self, until: float) -> None:
        """Unwind captured stacks until time.monotonic() reaches `until` or none is left."""
        while self._has_stacks and self.stacks.backlog and time.monotonic() < until:
            self.stacks.unwind(min(until, time.monotonic() + UNWIND_SECONDS))
            self._examine_new_processes(0)

    def _examine_new_processes(self, seconds: float) -> None:
        """Wait up to `seconds` for announced processes, and read their mappings before they end."""
        ready = select.poll()
        if self._new_processes:
            ready.register(self._new_processes, select.POLLIN)
        if ready.poll(1000 * seconds) and self._new_processes:
            self.stacks.names.read_mappings(self._new_processes.read())

    def map(self, name: str) -> HashMap:
        return self._pairs.hashes[name]

    def read_steady(self, name: str) -> Entries:
        """Read the map `name`, to which programs may write meanwhile.

        Returns copies of the entries that did not change between two reads (HashMap.read_steady()).
        """
        return self._pairs.hashes[name].read_steady(self._pairs.buffers)

    @property
    def lost_events(self) -> int:
        """Sum of all losses, whatever their reason."""
        return sum(self.losses().values())

    def losses(self) -> dict[str, int]:
        """Numbers of lost events by a description such as `futex: threads full`, without zeros."""
        read = self._read_losses() if self._lost is None else self._lost
        losses = {what: n - self._lost_before.get(what, 0) for what, n in read.items()} | self.own_losses
        if self._has_stacks:
            losses["stacks: too many to be unwound"] = self.stacks.lost
        return {description: n for description, n in losses.items() if n}

    def _read_losses(self) -> dict[str, int]:
        """Numbers of events that the programs and the kernel have lost since the programs were loaded, by
        description, with zeros."""
        dropped, overflowed, stacks, _ = self._losses.read()
        losses = {f"{where}: {reason.replace('_', ' ')}": n for (where, reason), n in dropped.items()}
        losses |= {f"{where}: counted without names": n for where, n in overflowed.items()}
        losses |= {f"stacks: {reason.replace('_', ' ')}": n for reason, n in stacks.items()}
        # The kernel skips a run of a program that would interrupt another program, or a change of a map, on
        # the same CPU. It counts the skipped runs of each program.
        for (_, function), fd in zip(self.manifest.functions, self._functions, strict=True):
            description = f"{function}: was running already"
            losses[description] = losses.get(description, 0) + int(program_info(fd)[2])
        return losses

    def report(self) -> None:
        """Print the duration, the number of events and the losses of the trace to standard error."""
        lost = ", ".join(f"{what} {count:,}" for what, count in self.losses().items())
        self.progress.end()
        print(
            f"{self.title}: {self.elapsed:.1f} s, {self.events:,} events, lost: {lost or 'none'}",
            file=sys.stderr,
        )

    def stop(self) -> None:
        """End the trace as a signal would: windows() begins to detach the programs within one period."""
        self._stopped = True

    def _on_signal(self, number: int, _: object) -> None:
        if self._stopped or self.ended_ns:  # a second signal, or a signal while the result is being printed
            raise KeyboardInterrupt
        self._stopped = True

    def _is_over(self) -> bool:
        if self._duration is not None and time.monotonic() >= self._began + self._duration:
            return True
        return self._stopped or self._lifetimes.have_ended

    def _report_missing_hooks(self) -> None:
        """Print on standard error which hooks could not be attached.

        Raises HostError if a part that is not optional has no mechanism on this host.
        """
        self.progress.end()
        parts = [part for part in self.manifest.chosen if not part.mechanism]
        for part in parts:
            if part.what not in self._optional:
                raise HostError(f"{self.title}: {part.what} cannot be traced here: {part.instead_of}")
        # Hooks of an optional part that is missing are left out: the tool itself reports the part, with the
        # reasons of its hooks.
        missing = [
            hook
            for hook in self.manifest.hooks
            if not hook.attached and not any(hook.reason in part.instead_of for part in parts)
        ]
        for hook in missing[:MOST_HOOKS_REPORTED]:
            reason = f"{hook.mechanism} {hook.hook}: {hook.reason}"
            print(f"{self.title}: not attached: {printable(reason)}", file=sys.stderr)
        if len(missing) > MOST_HOOKS_REPORTED:
            print(f"{self.title}: {len(missing):,} hooks in all could not be attached", file=sys.stderr)

    def _open_new_processes(self) -> BlockedProcesses | None:
        """The reader of announced processes; None if the trace takes no stacks, or if the ring buffer cannot
        be read."""
        fd = self.fds.get(BLOCKED_PROCESSES)
        if fd is None or not self._has_stacks:
            return None
        info = next(info for info in self.manifest.maps if info.name == BLOCKED_PROCESSES)
        try:
            return BlockedProcesses(Ring(fd, info.entries))
        except OSError:
            return None

    def _traced_ids(self) -> list[tuple[HashMap, tuple[int, ...]]]:
        """The maps TRACED_PROCESSES and TRACED_THREADS, each with the ids to write to it.

        A map without ids, or that was not loaded, is left out.
        """
        ids = {TRACED_PROCESSES: self._only, TRACED_THREADS: self._threads}
        return [(self.map(name), numbers) for name, numbers in ids.items() if name in self.fds and numbers]

    def _forget_ended(self) -> None:
        """Have the programs forget the ids of processes and threads that have ended, since new ones may get
        the same ids."""
        for name, ids in self._lifetimes.take_ended().items():
            if name in self.fds:
                self.map(name).delete(np.array(ids, np.uint32))

    def _drain(self) -> dict[str, Entries]:
        """Drain the idle map of each pair, then flip. Returns the entries by pair, without empty pairs."""
        while not self._pairs.is_settled:
            self._examine_new_processes(0.001)
        taken = {name: rows for name, rows in self._pairs.drain() if len(rows[0])}
        self._pairs.flip()
        if self._has_stacks and (refused := self.stacks.add(taken)):
            self.map(KEPT).delete(np.array(refused, np.uint64))
        return taken

    def _name_stacks(self) -> None:
        """Unwind the stacks for which there was no time while the trace went on."""
        while self._has_stacks and self.stacks.backlog:
            self.progress.show_text(f"{self.title}: naming {self.stacks.backlog:,} stacks")
            self.stacks.unwind(time.monotonic() + PROGRESS_SECONDS)

    def _detach(self) -> None:
        if not self.ended_ns:
            self.ended_ns = time.monotonic_ns()
        hooks = [hook.hook for hook in self.manifest.hooks if hook.attached]
        attached, self._attached = self._attached, []
        # In reverse order, hooks at beginnings of waits are detached before hooks at their ends. Otherwise a
        # wait could be seen to begin but not to end, and would seem to go on.
        for hook, fd in reversed(list(zip(hooks, attached, strict=False))):
            if hook == "sched_switch":
                _visit_cpus()
            _close([fd])


class Progress:
    """The progress of a trace: one line that changes, on a terminal only.

    The cursor stays behind the text, so end() must be called before anything else is printed there.
    """

    def __init__(self, stream: TextIO) -> None:
        self._lines = stream
        self._terminal = stream if stream.isatty() else None
        self._next = 0.0
        self._is_shown = False

    def show_text(self, text: str) -> None:
        """Replace the progress line by `text`."""
        if self._terminal:
            self._terminal.write(f"\r\x1b[K{text}")
            self._terminal.flush()
            self._is_shown = True

    @property
    def is_due(self) -> bool:
        """Whether show_counts() should be called, as the line is older than PROGRESS_SECONDS."""
        return self._terminal is not None and time.monotonic() >= self._next

    def announce(self, text: str) -> None:
        """Show that tracing begins. Without a terminal too: scripts wait for this line."""
        if self._terminal:
            self.show_text(text)
        else:
            print(text, file=self._lines, flush=True)

    def show_counts(self, elapsed: float, events: int, lost: int) -> None:
        """Replace the progress line by the seconds, events and lost events so far."""
        self._next = time.monotonic() + PROGRESS_SECONDS
        self.show_text(f"{elapsed:.0f} s, {events:,} events, {lost:,} lost; Ctrl-C ends")

    def end(self) -> None:
        """Clear the progress line, if one is shown."""
        if self._terminal and self._is_shown:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()
            self._is_shown = False


class Lifetimes:
    """The processes `tgids` and threads `tids` that a trace is limited to, and which of them have ended.

    Descriptors of the processes are closed with `opened`. Raises UsageError for an id that does not exist.
    """

    def __init__(self, tgids: Iterable[int], tids: Iterable[int], opened: contextlib.ExitStack) -> None:
        self._processes = {_open_process(tgid, opened): tgid for tgid in tgids}
        """Ids of processes that have not ended, by their pidfds."""
        self._started = {tid: _start_of_thread(tid) for tid in tids}
        """Start times of threads that have not ended, by id. Those examined last are at the end."""
        self._is_limited = bool(self._processes or self._started)

    @property
    def have_ended(self) -> bool:
        """Whether take_ended() has returned all processes and threads; False if the trace is not limited to
        any."""
        return self._is_limited and not (self._processes or self._started)

    def take_ended(self) -> dict[str, list[int]]:
        """The ids of processes and threads that have ended, by the name of the BPF map that has them.

        Each id is returned once. Of the threads, at most EXAMINED_AT_ONCE are examined in each call.
        """
        poll = select.poll()
        for fd in self._processes:
            poll.register(fd, select.POLLIN)
        processes = [self._processes.pop(fd) for fd, _ in poll.poll(0)]
        threads = []
        for tid, start in list(self._started.items())[:EXAMINED_AT_ONCE]:
            del self._started[tid]
            if _start_time(tid) == start:
                self._started[tid] = start
            else:
                threads.append(tid)
        return {TRACED_PROCESSES: processes, TRACED_THREADS: threads}


def _open_process(tgid: int, opened: contextlib.ExitStack) -> int:
    """Open a pidfd, which becomes readable when the process ends; `opened` closes it.

    Raises UsageError if there is no process with this id, or if it cannot be opened.
    """
    try:
        fd = os.pidfd_open(tgid)
    except OSError as error:
        if error.errno in OF_A_THREAD and _start_time(tgid):
            raise UsageError(f"process {tgid}: it is a thread; rule: the id of a process") from error
        raise UsageError(f"process {tgid}: {error.strerror}") from error
    opened.callback(os.close, fd)
    return fd


def _start_of_thread(tid: int) -> str:
    start = _start_time(tid)
    if not start:
        raise UsageError(f"thread {tid}: No such thread")
    return start


def _start_time(tid: int) -> str:
    """Start time of a thread in clock ticks since boot (proc_pid_stat(5)); empty if the thread has ended.

    The time tells the thread from later threads with the same id.
    """
    try:
        with open(f"/proc/{tid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _visit_cpus() -> None:
    """Run on each CPU of this process's affinity for a moment, so that the thread there is switched out.

    The programs for futex calls keep the latest calls of the running thread in a per-CPU variable. They add
    these calls to a map when the thread is switched out.
    """
    allowed = os.sched_getaffinity(0)
    for cpu in allowed:
        with contextlib.suppress(OSError):  # the CPU has just been taken offline
            os.sched_setaffinity(0, {cpu})
    os.sched_setaffinity(0, allowed)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
