"""Two of the other processes: the loader, which hands over and exits, and the exporter."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import signal
import socket
import subprocess
from pathlib import Path

from lockd import isolated
from lockd.errors import ConfigError, HostError, LockdError, error_of
from lockd.load import handover
from lockd.load.settings import LoadSettings
from lockd.manifest import Manifest
from lockd.snapshot import RELOAD, SERVE

log = logging.getLogger(__name__)

LOADER_TIMEOUT = 300.0
"""Seconds. An emulated or overloaded host compiles for minutes; systemd (TimeoutStartSec) gives up sooner."""
ENDING_SECONDS = 3.0
LAST_WORDS_BYTES = 1 << 20
"""Of what the loader prints; of more than that, the end."""
LOADER_FILE_BYTES = 64 << 20
"""The largest file that the loader may write, as the one that it prints to is in memory."""
KILLED_SECONDS = 2.0
"""Until what was killed is gone."""
OTHER_DESCRIPTORS = 512
"""That a process may have open besides those of what a trace is attached to."""
NO_AUTHORITIES = {"SSL_CERT_FILE": os.devnull}
"""tornado, once imported, reads the certificates of all authorities that the host trusts: a fifth of the
exporter's start, for clients of other servers, which it never is."""


class Loader:
    """The process that compiles and attaches. It works while its parent does something else."""

    def __init__(self, settings: LoadSettings) -> None:
        _make_room(settings)
        self._ours, theirs = socket.socketpair()
        # No pipe: it would wait for whoever reads that, who waits for what it hands over.
        self._errors = os.fdopen(os.memfd_create("loader-stderr"), "r+b")
        with theirs:
            self._child = subprocess.Popen(
                [*isolated.command("lockd.load"), str(theirs.fileno())],
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
                ended = f"loader: {how_it_ended(code)}" if code else str(error)
                raise error_of(code)(words or ended) from None
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


class Exporter:
    """The exporter process, and our end of its control socket. It serves nothing until it is told to."""

    def __init__(
        self,
        listening: list[socket.socket],
        web_config: Path | None,
        log_level: str,
        requests_share: float | None = None,
        web_kept: int | None = None,
    ) -> None:
        """`web_kept` is an unnamed file in which one exporter tells the next what keeps people out."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Nobody waits for it, whatever it does. Nor is there room for more than a few answers that it has not
        # read: each of them keeps its block in memory.
        self.control.setblocking(False)
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)
        with theirs:
            arguments = [*isolated.command("lockd.export"), "--control-fd", str(theirs.fileno())]
            for each in listening:
                arguments += ["--listen-fd", str(each.fileno())]
            if web_config:
                arguments += ["--web-config", str(web_config)]
            if requests_share:
                arguments += ["--requests-share", str(requests_share)]
            if web_kept is not None:
                arguments += ["--web-kept-fd", str(web_kept)]
            fds = [theirs.fileno(), *(each.fileno() for each in listening)]
            fds += [] if web_kept is None else [web_kept]
            # A session of its own: Ctrl-C on a terminal is for the sampler, which ends it.
            self._child = subprocess.Popen(
                [*arguments, "--log-level", log_level],
                pass_fds=fds,
                start_new_session=True,
                env=os.environ | NO_AUTHORITIES,
            )
        self.pid = self._child.pid
        self._is_serving = False

    def serve(self) -> None:
        """There is something to serve from now on."""
        self._is_serving = True
        with contextlib.suppress(OSError):  # it has ended: its end of the socket says so as well
            self.control.send(SERVE)

    def reload(self, log_level: str, requests_share: float | None) -> bool:
        """Ask it to take these, and to read the web configuration; whether there was room to ask."""
        share = requests_share or math.inf
        try:
            self.control.send(b" ".join([RELOAD, log_level.encode(), str(share).encode()]))
        except BlockingIOError:
            return False
        except OSError:  # as in serve()
            pass
        return True

    def let_go(self) -> None:
        """Let it end, which it does when its control socket closes."""
        self.control.close()
        if not self._is_serving:  # it may not have come to look at the socket yet
            with contextlib.suppress(PermissionError):
                self._child.terminate()

    def code(self) -> int | None:
        """What it has ended with; None if it has not."""
        return self._child.poll()

    def kill(self) -> None:
        """It would go on to take connections, beside the next exporter or in the way of the next daemon."""
        log.warning("exporter: process %d does not end: killing it", self.pid)
        try:
            self._child.kill()
        except PermissionError:  # it is another user's by now, and may keep the port
            log.error("exporter: process %d cannot be killed without CAP_KILL", self.pid)

    def end(self) -> int | None:
        """Wait for its end, for some seconds at most, and kill it if it does not; as code()."""
        self.let_go()
        try:
            return self._child.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(KILLED_SECONDS)
        return None


def how_it_ended(code: int) -> str:
    """The exit code of a child, in words."""
    signals = {one.value: one.name for one in signal.Signals}
    return f"ended by {signals.get(-code, f'signal {-code}')}" if code < 0 else f"ended with code {code}"


def check_web_config(path: Path) -> None:
    """Raises ConfigError if the exporter, as the user that it runs as, could not use it."""
    command = [*isolated.command("lockd.export"), "--check", "--web-config", str(path)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | NO_AUTHORITIES
    )
    if done.returncode:
        raise ConfigError(
            done.stdout.strip() or f"{path}: the exporter cannot read it: code {done.returncode}"
        )


def listen(addresses: list[tuple[str, int]]) -> list[socket.socket]:
    """A listening socket for each address; no host means every interface, by IPv6 and by IPv4.

    Raises LockdError that names the one that cannot be had.
    """
    sockets: list[socket.socket] = []
    for host, port in addresses:
        try:
            sock = _listening(host, port)
        except OSError as error:
            for one in sockets:
                one.close()
            # Python adds to strerror what is said already; a host name's error is no errno.
            is_name = isinstance(error, socket.gaierror)
            reason = error.strerror if is_name else os.strerror(error.errno or 0)
            raise LockdError(
                f"{host}:{port}: cannot listen there: {reason}: "
                "choose another with --web.listen-address=HOST:PORT or web.listen"
            ) from error
        sockets.append(sock)
    return sockets


def _listening(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return socket.create_server(found[0][4], family=found[0][0], backlog=128)
