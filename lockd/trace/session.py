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

from lockd.children import run_loader
from lockd.errors import HostError
from lockd.load.settings import LoadSettings
from lockd.sample.inflight import read_steady
from lockd.sample.losses import Losses
from lockd.sample.maps import HashMap
from lockd.sample.pairs import Pairs, Rows
from lockd.trace.progress import Progress

PERIOD = 0.05
"""Seconds between two drains of the maps."""
TRACED_PROCESSES, TRACED_THREADS = "traced_processes", "traced_threads"


class Session:
    """Attaches `settings`; a context, and its end detaches everything.

    Ends after `duration` seconds (None: never), by SIGINT or SIGTERM, or when each of the processes
    `only` has ended; `threads` are followed besides. `title` is what progress and errors speak of.
    `others` are maps that the command reads by itself.
    """

    def __init__(
        self,
        title: str,
        settings: LoadSettings,
        duration: float | None = None,
        only: Iterable[int] = (),
        threads: Iterable[int] = (),
        others: tuple[str, ...] = (),
    ) -> None:
        self.title = title
        self._settings = settings
        self._duration = duration
        self._only, self._threads = tuple(only), tuple(threads)
        self._others = others
        self._stopped = False
        self.events = 0
        """What the command has counted so far, for the progress it shows."""
        self.progress = Progress(sys.stderr)
        self.ended_ns = 0
        """Of CLOCK_MONOTONIC, when everything was detached."""

    def __enter__(self) -> Session:
        self._handlers = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        self._alive = self._opened_processes()
        self.progress.say(f"{self.title}: attaching")
        self.manifest, fds = run_loader(self._settings)
        maps = len(self.manifest.maps)
        functions = maps + len(self.manifest.functions)
        self.fds = dict(zip((info.name for info in self.manifest.maps), fds, strict=False))
        """Descriptors of maps by name."""
        self._attached = fds[functions:]
        self._others_open = fds[:functions]
        self._pairs = Pairs(self.manifest, fds, self._others)
        self._losses = Losses(self.manifest, self._pairs.losses)
        self._list(TRACED_PROCESSES, self._only)
        self._list(TRACED_THREADS, self._threads)
        self.began_ns, self._began = time.monotonic_ns(), time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()
        for fd in (*self._others_open, *self._alive):
            os.close(fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.progress.end()

    @property
    def elapsed(self) -> float:
        """Seconds since everything was attached."""
        return ((self.ended_ns or time.monotonic_ns()) - self.began_ns) / 1e9

    def windows(self) -> Iterator[dict[str, Rows]]:
        """What was drained, by pair and without empty ones, until the trace ends; then what is left."""
        due = self._began + PERIOD
        while not self._is_over():
            self.wait(due)
            due = max(due + PERIOD, time.monotonic())
            yield self._drained()
            self.progress.show(self.elapsed, self.events, self.dropped)
        self._detach()
        for _ in range(2):
            yield self._drained()

    def wait(self, until: float) -> None:
        """Until that time of time.monotonic(), or a signal."""
        while not self._stopped and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, PERIOD))

    def map(self, name: str) -> HashMap:
        return self._pairs.hashes[name]

    def steady(self, name: str) -> Rows:
        """The entries of a table that programs write to."""
        return read_steady(self._pairs.hashes[name], self._pairs.buffers)

    @property
    def dropped(self) -> int:
        """Events that were lost, of all sorts."""
        return sum(self.losses().values())

    def losses(self) -> dict[str, int]:
        """What was lost, by map and reason in words, without what was not."""
        dropped, overflowed, stacks, _ = self._losses.read()
        words = {f"{where}: {reason.replace('_', ' ')}": n for (where, reason), n in dropped.items()}
        words |= {f"{where}: counted without names": n for where, n in overflowed.items()}
        words |= {f"stacks: {reason.replace('_', ' ')}": n for reason, n in stacks.items()}
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
        if self._stopped:  # twice: at once
            raise KeyboardInterrupt
        self._stopped = True

    def _is_over(self) -> bool:
        if self._duration is not None and time.monotonic() >= self._began + self._duration:
            return True
        if self._stopped or not self._only or self._threads:
            return self._stopped
        poll = select.poll()
        for fd in self._alive:
            poll.register(fd, select.POLLIN)
        return len(poll.poll(0)) == len(self._alive)

    def _opened_processes(self) -> list[int]:
        opened: list[int] = []
        for tgid in self._only:
            try:
                opened.append(os.pidfd_open(tgid))
            except OSError as error:
                for fd in opened:
                    os.close(fd)
                raise HostError(f"{self.title}: process {tgid}: {error.strerror}") from error
        return opened

    def _list(self, name: str, ids: tuple[int, ...]) -> None:
        if name in self.fds:
            for number in ids:
                self._pairs.hashes[name].put(np.array([number], np.uint32), np.array([1], np.uint8))

    def _drained(self) -> dict[str, Rows]:
        while not self._pairs.is_settled:
            time.sleep(0.001)
        taken = {name: rows for name, rows in self._pairs.drain() if len(rows[0])}
        self._pairs.flip()
        return taken

    def _detach(self) -> None:
        if not self.ended_ns:
            self.ended_ns = time.monotonic_ns()
        for fd in self._attached:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._attached = []
