"""The loader as a child process: started, given its settings, and its result taken over."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import subprocess

from lockd.errors import HostError, LockdError, describe_exit, error_class
from lockd.kernel.manifest import Manifest
from lockd.load import handover
from lockd.load.settings import LoadSettings
from lockd.process import isolation

log = logging.getLogger(__name__)

LOADER_TIMEOUT = 300.0
"""Seconds. An emulated or overloaded host compiles for minutes; systemd (TimeoutStartSec) gives up sooner."""
LAST_WORDS_BYTES = 1 << 20
"""The end of the loader's output that is relayed; what came before is left out."""
LOADER_FILE_BYTES = 64 << 20
"""The largest file that the loader may write. Its output goes to a file in memory."""
OTHER_DESCRIPTORS = 512
"""The descriptors that a process may need besides those of a trace's hooks."""


class Loader:
    """The process that compiles and attaches. It works while its parent does something else."""

    def __init__(self, settings: LoadSettings) -> None:
        _make_room(settings)
        self._ours, theirs = socket.socketpair()
        # No pipe: it would wait for whoever reads that, who waits for what it hands over.
        self._errors = os.fdopen(os.memfd_create("loader-stderr"), "r+b")
        with theirs:
            self._child = subprocess.Popen(
                [*isolation.command("lockd.load"), str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
            )
        resource.prlimit(self._child.pid, resource.RLIMIT_FSIZE, (LOADER_FILE_BYTES, LOADER_FILE_BYTES))
        assert self._child.stdin
        with contextlib.suppress(BrokenPipeError), self._child.stdin as pipe:  # it ended: result() says why
            pipe.write(settings.to_json())

    def result(self) -> tuple[Manifest, list[int]]:
        """Wait for its manifest and descriptors, and for its end. Raises LockdError with its words."""
        self._ours.settimeout(LOADER_TIMEOUT)
        with self._ours, self._errors:
            try:
                result = handover.receive(self._ours)
            except TimeoutError:
                self._child.kill()
                raise LockdError(f"loader: nothing handed over within {LOADER_TIMEOUT:g} s") from None
            except LockdError as error:
                words = self._last_words()
                code = self._child.returncode
                ended = f"loader: {describe_exit(code)}" if code else str(error)
                raise error_class(code)(words or ended) from None
            if words := self._last_words():
                log.debug("loader: %s", words)
        return result

    def _last_words(self) -> str:
        """Wait for its end, and relay what it logged; the rest."""
        try:
            self._child.wait(LOADER_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        before = os.fstat(self._errors.fileno()).st_size - LAST_WORDS_BYTES
        self._errors.seek(max(before, 0))
        if before > 0:
            self._errors.readline()  # a part of one
        return _relay(self._errors.read())


def run_loader(settings: LoadSettings) -> tuple[Manifest, list[int]]:
    """Compile and attach in a child; its manifest and descriptors. Raises LockdError with its words."""
    return Loader(settings).result()


def _make_room(settings: LoadSettings) -> None:
    """For all descriptors that are needed, in the loader as well, and for one of each place that a trace is
    attached to, if that may be. Raises HostError if it may not even be the first."""
    parts = settings.trace.parts if settings.trace else ()
    wanted = OTHER_DESCRIPTORS + sum(max((len(way.hooks) for way in part.ways), default=0) for part in parts)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return
    if 0 <= hard < wanted:
        with contextlib.suppress(ValueError, OSError):  # without CAP_SYS_RESOURCE
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
            return
        if hard < OTHER_DESCRIPTORS:
            raise HostError(
                f"the limit on open files (RLIMIT_NOFILE) is {hard} and cannot be raised without "
                f"CAP_SYS_RESOURCE; rule: at least {OTHER_DESCRIPTORS}, as by LimitNOFILE={OTHER_DESCRIPTORS}"
                f" in the unit, or ulimit -n {OTHER_DESCRIPTORS}"
            )
        wanted = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _relay(errors: bytes) -> str:
    """Log what the loader logged, with its level in front of each line (load/__main__.py); the rest, which
    are its last words."""
    rest = []
    for line in errors.decode(errors="replace").splitlines():
        level, _, text = line.partition(":")
        number = logging.getLevelName(level)
        if isinstance(number, int):
            log.log(number, "loader: %s", text)
        else:
            rest.append(line)
    return "\n".join(rest).strip()
