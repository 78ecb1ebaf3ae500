"""One trace from attaching to the last event: the loader, the windows that are drained, how it ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType

import numpy as np

from lockd.errors import HostError
from lockd.kernel.counters import Losses, Lost, program_info
from lockd.kernel.maps import HashMap
from lockd.kernel.pairs import Entries, Pairs
from lockd.kernel.rings import Ring
from lockd.load.child import run_loader
from lockd.load.settings import LoadSettings
from lockd.names.blocked_processes import BlockedProcesses
from lockd.names.unwind.stacks import FUNCTIONS, Shown
from lockd.trace.core.call_stacks import CallStacks
from lockd.trace.core.lifetimes import Lifetimes
from lockd.trace.core.progress import Progress

PERIOD = 0.05
"""Seconds between two drains of the maps."""
NAMING_SECONDS = 0.2
"""Between two lines of progress while stacks are named at the end."""
UNWOUND_AT_ONCE = 0.002
"""Seconds for which no process is looked at that may be ending."""
TOLD_MISSING = 10
"""Hooks that could not be attached, of which each is told."""
STACKS_ASKED_FOR = {"WITH_USER_STACKS", "WITH_KERNEL_STACKS"}
"""Of the defines in lockd/trace/core/options.py."""
BLOCKED_PROCESSES = "blocked_processes"
TRACED_PROCESSES, TRACED_THREADS = "traced_processes", "traced_threads"


class Session:
    """Attaches `settings`; a context, and its end detaches everything.

    Ends after `duration` seconds (None: never), by SIGINT or SIGTERM, or when each of the processes `only`
    and of `threads` has ended, if there are such. `title` is what progress and errors speak of.
    `others` are maps that the command reads by itself, `optional` the parts (lockd/load/hooks.py, Part.what)
    it can do without; `shown` is what is told of the frames of stacks.
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
        shown: Shown = FUNCTIONS,
    ) -> None:
        self.title = title
        self._settings = settings
        self._duration = duration
        self._only, self._threads = tuple(only), tuple(threads)
        self._others, self._optional = others, optional
        self._stopped = False
        self.events = 0
        """What the command has counted so far, for the progress it shows."""
        self.progress = Progress(sys.stderr)
        self.stacks = CallStacks(shown=shown)
        """Those of the windows that were drained so far."""
        self._has_stacks = bool(settings.trace and STACKS_ASKED_FOR & settings.trace.defines.keys())
        self._lost: Lost | None = None
        """Until the end."""
        self.ended_ns = 0
        """Of CLOCK_MONOTONIC, when everything was detached."""

    def __enter__(self) -> Session:
        """Raises UsageError for ids of nothing, HostError if what is required cannot be attached."""
        with contextlib.ExitStack() as opened:
            self._lifetimes = Lifetimes(self._only, self._threads, opened)
            self.progress.say(f"{self.title}: attaching")
            opened.callback(self.progress.end)
            if self._has_stacks:
                self.stacks.names.load(self._only)
            self.manifest, fds = run_loader(self._settings)
            maps = len(self.manifest.maps)
            functions = maps + len(self.manifest.functions)
            self._functions, self._attached = fds[maps:functions], fds[functions:]
            opened.callback(self._detach)
            opened.callback(_close, fds[:functions])
            self._tell_what_is_missing()
            self.fds = dict(zip((info.name for info in self.manifest.maps), fds, strict=False))
            """Descriptors of maps by name."""
            self._pairs = Pairs(self.manifest, fds, (BLOCKED_PROCESSES, *self._others))
            self._losses = Losses(self.manifest, self._pairs.losses)
            self._seen = self._processes_seen()
            self._list(TRACED_PROCESSES, self._only)
            self._list(TRACED_THREADS, self._threads)
            self.began_ns, self._began = time.monotonic_ns(), time.monotonic()
            # Not before: while it attaches, a signal ends it at once, as there is nothing to print.
            for number in (signal.SIGINT, signal.SIGTERM):
                opened.callback(signal.signal, number, signal.signal(number, self._on_signal))
            self._opened = opened.pop_all()
        self.progress.begin(f"{self.title}: tracing")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    @property
    def elapsed(self) -> float:
        """Seconds since everything was attached."""
        return ((self.ended_ns or time.monotonic_ns()) - self.began_ns) / 1e9

    def windows(self) -> Iterator[dict[str, Entries]]:
        """What was drained, by pair and without empty ones, until the trace ends; then what is left."""
        due = self._began
        while not self._is_over():
            due = max(due + PERIOD, time.monotonic())
            self.wait(due if self._duration is None else min(due, self._began + self._duration))
            yield self._drained()
            self._unwind(min(due, time.monotonic()) + PERIOD / 2)
            if self.progress.is_due:
                self.progress.show(self.elapsed, self.events, self.dropped)
        # First all programs end at one moment: none of them misses the end of what another saw begin.
        self._unlist(TRACED_PROCESSES, self._only)
        self._unlist(TRACED_THREADS, self._threads)
        self.progress.say(f"{self.title}: detaching")
        # While it detaches, ends are seen without their beginnings, as of a lock: then nothing is lost.
        self._lost = self._losses.read()
        self._detach()
        for _ in range(2):
            yield self._drained()
        self._name_stacks()

    def wait(self, until: float) -> None:
        """Until that time of time.monotonic(), or a signal. Processes that are new are looked at at once."""
        while not self._stopped and (left := until - time.monotonic()) > 0:
            self._look(min(left, PERIOD))

    def _unwind(self, until: float) -> None:
        """What was captured, as far as there is time."""
        while self._has_stacks and self.stacks.waiting and time.monotonic() < until:
            self.stacks.work(min(until, time.monotonic() + UNWOUND_AT_ONCE))
            self._look(0)

    def _look(self, seconds: float) -> None:
        """At processes that were just seen, as they may end at any moment; waits for such so long."""
        ready = select.poll()
        if self._seen:
            ready.register(self._seen, select.POLLIN)
        if ready.poll(1000 * seconds) and self._seen:
            self.stacks.names.look(self._seen.read())

    def map(self, name: str) -> HashMap:
        return self._pairs.hashes[name]

    def steady(self, name: str) -> Entries:
        """The entries of a table that programs write to."""
        return self._pairs.hashes[name].read_steady(self._pairs.buffers)

    @property
    def dropped(self) -> int:
        """Events that were lost, of all sorts."""
        return sum(self.losses().values())

    def losses(self) -> dict[str, int]:
        """What was lost, by map and reason in words, without what was not."""
        dropped, overflowed, stacks, _ = self._lost or self._losses.read()
        words = {f"{where}: {reason.replace('_', ' ')}": n for (where, reason), n in dropped.items()}
        words |= {f"{where}: counted without names": n for where, n in overflowed.items()}
        words |= {f"stacks: {reason.replace('_', ' ')}": n for reason, n in stacks.items()}
        if self._has_stacks:
            words["stacks: too many to be unwound"] = self.stacks.lost
        # Of programs called by what they do themselves, or while their CPU was changing a map.
        for (_, function), fd in zip(self.manifest.functions, self._functions, strict=True):
            what = f"{function}: was running already"
            words[what] = words.get(what, 0) + int(program_info(fd)[2])
        return {what: n for what, n in words.items() if n}

    def report(self) -> None:
        """Say on standard error what came of it."""
        lost = ", ".join(f"{what} {count:,}" for what, count in self.losses().items())
        self.progress.end()
        print(
            f"{self.title}: {self.elapsed:.1f} s, {self.events:,} events, lost: {lost or 'none'}",
            file=sys.stderr,
        )

    def stop(self) -> None:
        """End the trace at the next occasion."""
        self._stopped = True

    def _on_signal(self, number: int, _: object) -> None:
        if self._stopped or self.ended_ns:  # twice, or while the rest is being printed: at once
            raise KeyboardInterrupt
        self._stopped = True

    def _is_over(self) -> bool:
        if self._duration is not None and time.monotonic() >= self._began + self._duration:
            return True
        return self._stopped or self._lifetimes.are_over

    def _tell_what_is_missing(self) -> None:
        parts = [part for part in self.manifest.chosen if not part.mechanism]
        for part in parts:
            if part.what not in self._optional:
                raise HostError(f"{self.title}: {part.what} cannot be traced here: {part.instead_of}")
        # What a part wants that the command can do without is for the command to tell.
        missing = [
            hook
            for hook in self.manifest.hooks
            if not hook.attached and not any(hook.reason in part.instead_of for part in parts)
        ]
        for hook in missing[:TOLD_MISSING]:
            reason = f"{hook.mechanism} {hook.hook}: {hook.reason}"
            print(f"{self.title}: not attached: {reason}", file=sys.stderr)
        if len(missing) > TOLD_MISSING:
            print(f"{self.title}: {len(missing):,} in all could not be attached", file=sys.stderr)

    def _processes_seen(self) -> BlockedProcesses | None:
        """Those of which a stack was captured; None if the kernel has no ring buffers."""
        fd = self.fds.get(BLOCKED_PROCESSES)
        if fd is None or not self._has_stacks:
            return None
        info = next(info for info in self.manifest.maps if info.name == BLOCKED_PROCESSES)
        try:
            return BlockedProcesses(Ring(fd, info.entries))
        except OSError:
            return None

    def _list(self, name: str, ids: tuple[int, ...]) -> None:
        if name in self.fds:
            for number in ids:
                self._pairs.hashes[name].update(np.array([number], np.uint32), np.array([1], np.uint8))

    def _unlist(self, name: str, ids: tuple[int, ...]) -> None:
        if name in self.fds and ids:
            self._pairs.hashes[name].delete(np.array(ids, np.uint32))

    def _drained(self) -> dict[str, Entries]:
        while not self._pairs.is_settled:
            self._look(0.001)
        taken = {name: rows for name, rows in self._pairs.drain() if len(rows[0])}
        self._pairs.flip()
        if self._has_stacks:
            self.stacks.add(taken)
        return taken

    def _name_stacks(self) -> None:
        """What was not unwound in time."""
        while self._has_stacks and self.stacks.waiting:
            self.progress.say(f"{self.title}: naming {self.stacks.waiting:,} stacks")
            self.stacks.work(time.monotonic() + NAMING_SECONDS)

    def _detach(self) -> None:
        if not self.ended_ns:
            self.ended_ns = time.monotonic_ns()
        hooks = [hook.hook for hook in self.manifest.hooks if hook.attached]
        attached, self._attached = self._attached, []
        # What sees beginnings first: else some would be seen of which the ends no longer are.
        for hook, fd in reversed(list(zip(hooks, attached, strict=False))):
            if hook == "sched_switch":
                _visit_cpus()
            _close([fd])


def _visit_cpus() -> None:
    """Run on each CPU for a moment: what a thread has done there is counted when it leaves."""
    allowed = os.sched_getaffinity(0)
    for cpu in allowed:
        with contextlib.suppress(OSError):  # it has just gone
            os.sched_setaffinity(0, {cpu})
    os.sched_setaffinity(0, allowed)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
