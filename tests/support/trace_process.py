"""A real `lockd trace` on a terminal: the progress that it shows there tells when it has begun."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.support.lockd_process import CHECKOUT, ROOT, START_SECONDS

ENDING_SECONDS = 120.0


class Trace:
    """`lockd trace ARGUMENT...`; its constructor returns once everything is attached."""

    def __init__(self, *arguments: object) -> None:
        self._written = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._terminal, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*CHECKOUT, "trace", *map(str, arguments)], cwd=ROOT, stdout=self._written, stderr=theirs
        )
        os.close(theirs)
        self._shown = ""
        self._has_begun = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        began = self._has_begun.wait(START_SECONDS)
        if not began or self.process.poll() not in (None, 0):
            self.process.kill()
            raise AssertionError(f"lockd trace {' '.join(map(str, arguments))}: {self._shown}")

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while data := os.read(self._terminal, 4096):
                self._shown += data.decode()
                if re.search(r"\d s, [\d,]+ events, [\d,]+ lost", self._shown):
                    self._has_begun.set()
        self._has_begun.set()

    def stop(self, number: int = signal.SIGINT) -> str:
        """Stop the trace, by default as Ctrl-C does, and return what it wrote to standard output."""
        self.process.send_signal(number)
        return self.result()

    def result(self) -> str:
        """Wait until the trace has ended, and return what it wrote to standard output."""
        try:
            code = self.process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join()
        assert code == 0, self.said
        self._written.seek(0)
        return self._written.read()

    @property
    def written(self) -> str:
        """What the trace has written to standard output so far."""
        descriptor = self._written.fileno()
        # pread() leaves the position alone, at which the trace writes.
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()

    @property
    def said(self) -> str:
        """What the trace wrote to standard error, without the progress."""
        lines = self._shown.replace("\r\n", "\n").split("\n")
        return "\n".join(line.rpartition("\x1b[K")[2] for line in lines)

    @property
    def lost(self) -> dict[str, int]:
        """The numbers of events that the trace reports as lost, by map and reason."""
        found = re.search(r"[\d,]+ events, lost: (.*)", self.said)
        assert found, self.said
        if found[1] == "none":
            return {}
        pairs = re.findall(r"([a-z_ ]+: [a-z ]+?) ([\d,]+)(?:, |$)", found[1])
        assert pairs, found[1]
        return {what: int(count.replace(",", "")) for what, count in pairs}


@contextlib.contextmanager
def one_shot(*arguments: object) -> Iterator[Trace]:
    """Yield a trace that has ended at the end of the context, also if the test fails."""
    trace = Trace(*arguments)
    try:
        yield trace
    finally:
        if trace.process.poll() is None:
            trace.process.kill()
            trace.process.wait()


def samples_of(text: str) -> list[dict[str, Any]]:
    """Return the samples in the output of --format json, which has an object on each line."""
    return [json.loads(line) for line in text.splitlines()]


def folded(text: str) -> Counter[tuple[str, ...]]:
    """Return the stacks in the output of --format folded, with their values.

    By the rule of the programs that draw flame graphs, a stack is what is before the last blank of a line.
    """
    stacks: Counter[tuple[str, ...]] = Counter()
    for line in text.splitlines():
        stack, _, value = line.rpartition(" ")
        stacks[tuple(stack.split(";"))] += int(value)
    return stacks
