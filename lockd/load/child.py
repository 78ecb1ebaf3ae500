"""The loader as a child process: how it is started, and how it hands its result to its parent.

The settings go to the loader's standard input. The result comes back over a Unix socket: the manifest, and
the descriptors that belong to it. What the loader logs, and why it failed, is on its standard error.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import resource
import socket
import subprocess

from lockd.errors import HostError, LockdError, describe_exit, error_class
from lockd.kernel.manifest import Manifest
from lockd.load.settings import LoadSettings
from lockd.process import isolation, memory

log = logging.getLogger(__name__)

LOADER_TIMEOUT = 300.0
"""Seconds that the loader may take until it hands over its result; then it is killed. An emulated or
overloaded host compiles for minutes. systemd ends a service that is so slow even earlier (TimeoutStartSec=,
90 s by default)."""
KILLED_SECONDS = 10.0
"""Seconds that a loader which was killed may take to end. If it takes longer, it hangs in the kernel, and is
not waited for."""
LAST_WORDS_BYTES = 1 << 20
"""Bytes at the end of the loader's standard error that are relayed; what comes before is left out."""
LOADER_FILE_BYTES = 64 << 20
"""Bytes of the largest file that the loader may write: its standard error goes to a file in memory."""
OTHER_DESCRIPTORS = 512
"""Number of descriptors that the loader, or its parent, may need besides those for the hooks and processes of
a trace."""
FDS_PER_MESSAGE = 200
"""Descriptors sent in one message; the kernel takes at most 253 (SCM_MAX_FD)."""
LARGEST_MANIFEST = 1 << 26
"""Bytes of the largest manifest that is accepted. One with ten thousand hooks has a few million bytes."""


class Loader:
    """A child process that compiles and attaches the BPF programs.

    Its parent can do other work meanwhile, and then calls result().
    """

    def __init__(self, settings: LoadSettings) -> None:
        """Start the loader. Raises HostError if the limit on open files is too low."""
        raise_descriptor_limit(settings)
        self._socket, theirs = socket.socketpair()
        # A pipe could block the loader: its reader reads only after the result has arrived on the socket.
        self._errors = os.fdopen(memory.create_file("loader-stderr"), "r+b")
        with theirs:
            self._child = subprocess.Popen(
                [*isolation.command("lockd.load"), str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
            )
        resource.prlimit(self._child.pid, resource.RLIMIT_FSIZE, (LOADER_FILE_BYTES, LOADER_FILE_BYTES))
        assert self._child.stdin
        # If the loader has ended already, result() says why.
        with contextlib.suppress(BrokenPipeError), self._child.stdin as pipe:
            pipe.write(settings.to_json())

    def result(self) -> tuple[Manifest, list[int]]:
        """Wait for the loader's end; return its manifest and descriptors.

        Raises an error of the class that the loader ended with, or else LockdError. The message is the end of
        the loader's standard error, without what the loader logged. If the loader took too long, this comes
        first in the message.
        """
        self._socket.settimeout(LOADER_TIMEOUT)
        with self._socket, self._errors:
            try:
                result = receive_result(self._socket)
            except TimeoutError:
                self._child.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(KILLED_SECONDS)
                late = f"loader: nothing handed over within {LOADER_TIMEOUT:g} s"
                raise LockdError("\n".join(filter(None, (late, self._last_words())))) from None
            except LockdError as error:
                last_words = self._wait()
                code = self._child.returncode
                ended = f"loader: {describe_exit(code)}" if code else str(error)
                raise error_class(code)(last_words or ended) from None
            if last_words := self._wait():
                log.debug("loader: %s", last_words)
        return result

    def _wait(self) -> str:
        """Wait for the loader's end; return its last words."""
        try:
            self._child.wait(LOADER_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        return self._last_words()

    def _last_words(self) -> str:
        """Log what the loader has logged; return all other lines of its standard error."""
        start = os.fstat(self._errors.fileno()).st_size - LAST_WORDS_BYTES
        self._errors.seek(max(start, 0))
        if start > 0:
            self._errors.readline()  # skip a line whose beginning is left out
        return _relay(self._errors.read())


def run_loader(settings: LoadSettings) -> tuple[Manifest, list[int]]:
    """Compile and attach the BPF programs in a child process; return its manifest and descriptors.

    Raises as Loader() and Loader.result() do.
    """
    return Loader(settings).result()


def send_result(sock: socket.socket, manifest: Manifest, fds: list[int]) -> None:
    """Send the manifest's length, the number of descriptors and the manifest; then the descriptors."""
    text = manifest.to_json()
    sock.sendall(len(text).to_bytes(8, "little") + len(fds).to_bytes(8, "little") + text)
    for start in range(0, len(fds), FDS_PER_MESSAGE):
        socket.send_fds(sock, [b"f"], fds[start : start + FDS_PER_MESSAGE])


def receive_result(sock: socket.socket) -> tuple[Manifest, list[int]]:
    """Return the manifest and the descriptors that send_result() sent.

    Raises LockdError if they are incomplete, or if the manifest is invalid; no descriptor stays open then.
    """
    head = _read_exactly(sock, 16)
    size = int.from_bytes(head[:8], "little")
    if size > LARGEST_MANIFEST:
        raise LockdError(f"loader: handed over {size} bytes; rule: a manifest of at most {LARGEST_MANIFEST}")
    text = _read_exactly(sock, size)
    count = int.from_bytes(head[8:], "little")
    fds: list[int] = []
    while len(fds) < count:
        marker, received, flags, _ = socket.recv_fds(sock, 1, FDS_PER_MESSAGE)
        fds.extend(array.array("i", received))
        if not marker or flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            why = "there is room for no more (RLIMIT_NOFILE)" if marker else "it ended"
            raise LockdError(f"loader: {len(fds)} of {count} descriptors came over: {why}")
    try:
        return Manifest.from_json(text), fds
    except ValueError as error:
        for fd in fds:
            os.close(fd)
        raise LockdError(f"loader: {error}") from None


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            raise LockdError("loader: ended before it handed anything over")
        parts += part
    return parts


def raise_descriptor_limit(settings: LoadSettings, processes: int = 0) -> None:
    """Raise the limit on open files (RLIMIT_NOFILE), which the loader inherits, as far as needed and allowed.

    The loader needs OTHER_DESCRIPTORS, and one descriptor for each hook of a trace. Its parent needs one more
    for each of the `processes` that the trace is limited to. Raises HostError if not even OTHER_DESCRIPTORS
    are allowed.
    """
    parts = settings.trace.parts if settings.trace else ()
    hooks = sum(max((len(way.hooks) for way in part.ways), default=0) for part in parts)
    wanted = OTHER_DESCRIPTORS + hooks + processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return
    if 0 <= hard < wanted:
        with contextlib.suppress(ValueError, OSError):  # needs CAP_SYS_RESOURCE
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
    """Log the lines that the loader logged; return all other lines, which are its last words.

    A logged line begins with its level (load/__main__.py).
    """
    last_words = []
    for line in errors.decode(errors="replace").splitlines():
        level, _, text = line.partition(":")
        number = logging.getLevelName(level)
        if isinstance(number, int):
            log.log(number, "loader: %s", text)
        else:
            last_words.append(line)
    return "\n".join(last_words).strip()
