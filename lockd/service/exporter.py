"""The exporter as seen from the sampler: a child process, and the supervisor that replaces a lost one.

Exporter is one child process. Supervisor asks it every few seconds for a sign of life, and starts another one
when it has ended or hangs. While lockd runs, neither of them makes the sampler wait.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockd.errors import LockdError, describe_exit, error_class
from lockd.messages import PING, RELOAD, SERVE, SERVING
from lockd.printable import host_port
from lockd.process import isolation

log = logging.getLogger(__name__)

ENDING_SECONDS = 3.0
"""Seconds for an exporter to end by itself when lockd ends."""
KILLED_SECONDS = 2.0
"""Seconds for a killed exporter to be gone when lockd ends."""
NO_AUTHORITIES = {"SSL_CERT_FILE": os.devnull}
"""Environment variables for the exporter, with which it finds no certificates of authorities. Otherwise the
import of tornado would read all that the host trusts, which takes a fifth of the exporter's start. Only a TLS
client needs them."""
PING_SECONDS = 2.0
"""Seconds between two questions whether the exporter lives."""
LONGEST_SILENCE, LONGEST_START = 15, 60
"""Questions in a row without an answer after which an exporter counts as hanging: one that serves, and one
that still starts, as an overloaded host takes long to start Python. Questions are counted, not seconds: time
also passes while this process is stopped and asks nothing."""
EXIT_SECONDS = 10.0
"""Seconds, in addition to SHORTEST_PAUSE, that the first exporter may take to end after it has closed its
socket."""
SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds from the loss of an exporter to the start of the next. The pause doubles each time, and is the
shortest again after an exporter has served for longer than the pause. It is never 0: if somebody ends all
processes of the service, this process may be the last that is ended, and should not start another exporter
before it ends."""
ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""The errnos for an address that this host does not have, also because it has no IPv6."""


class Exporter:
    """An exporter process, and the sampler's end of its control socket. It serves nothing until serve()."""

    def __init__(
        self,
        listening: list[socket.socket],
        web_config: Path | None,
        log_level: str,
        requests_share: float | None = None,
        web_kept: int | None = None,
    ) -> None:
        """Start the process.

        `listening` are the sockets that it serves, `web_config` is the path of the web configuration, and
        `requests_share` the share of one processor for the requests of one source (None for no limit).
        `web_kept` is the descriptor of a file in memory with the names of the protections in force, such as
        TLS and users, for the exporter that replaces this one. Raises OSError if the process cannot be
        started.
        """
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A send to the exporter never blocks, whatever the exporter does. The socket has room for only a few
        # unread answers, because the block of each answer stays in memory until the answer is read.
        self.control.setblocking(False)
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)
        with theirs:
            arguments = [*isolation.command("lockd.export"), "--control-fd", str(theirs.fileno())]
            for sock in listening:
                arguments += ["--listen-fd", str(sock.fileno())]
            if web_config:
                arguments += ["--web-config", str(web_config)]
            if requests_share:
                arguments += ["--requests-share", str(requests_share)]
            if web_kept is not None:
                arguments += ["--web-kept-fd", str(web_kept)]
            fds = [theirs.fileno(), *(sock.fileno() for sock in listening)]
            fds += [] if web_kept is None else [web_kept]
            # A session of its own: Ctrl-C on a terminal is for the sampler, which then ends the exporter.
            self._child = subprocess.Popen(
                [*arguments, "--log-level", log_level],
                pass_fds=fds,
                start_new_session=True,
                env=os.environ | NO_AUTHORITIES,
            )
        self.pid = self._child.pid
        self._is_serving = False

    def serve(self) -> None:
        """Let the exporter accept connections: the sampler answers requests from now on."""
        self._is_serving = True
        with contextlib.suppress(OSError):  # the exporter has ended; the next recv() shows this too
            self.control.send(SERVE)

    def reload(self, log_level: str, requests_share: float | None) -> bool:
        """Have the exporter take these settings and read the web configuration again.

        Returns False if its socket is full, so that the message has to be sent later.
        """
        share = requests_share or math.inf
        try:
            self.control.send(b" ".join([RELOAD, log_level.encode(), str(share).encode()]))
        except BlockingIOError:
            return False
        except OSError:  # the exporter has ended; the next recv() shows this too
            pass
        return True

    def close(self) -> None:
        """Close the control socket, which makes the exporter end."""
        self.control.close()
        if not self._is_serving:  # the exporter may still be starting, and read the socket only later
            with contextlib.suppress(PermissionError):
                self._child.terminate()

    def exit_code(self) -> int | None:
        """The exit code, or the negative number of the signal that ended the process; None while it runs."""
        return self._child.poll()

    def kill(self) -> None:
        """Kill the process, which would otherwise take connections beside the next exporter or daemon."""
        log.warning("exporter: process %d does not end and is killed", self.pid)
        try:
            self._child.kill()
        except PermissionError:  # the exporter runs as another user
            log.error(
                "exporter: process %d cannot be killed without CAP_KILL, and may keep its port", self.pid
            )

    def end(self) -> int | None:
        """End the process, by SIGKILL if it takes more than ENDING_SECONDS. Returns what exit_code()
        returns."""
        self.close()
        try:
            return self._child.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(KILLED_SECONDS)
        return None


class Supervisor:
    """Watches the exporter and replaces it when it is lost. Never waits for an answer or for an end."""

    def __init__(self, start: Callable[[], Exporter], exporter: Exporter) -> None:
        """`exporter` is the first one, which runs and may serve from now on. `start` starts another one."""
        self._start = start
        self.exporter: Exporter | None = None
        """The running exporter; None from the loss of one to the start of the next."""
        self._unanswered = 0
        """Questions in a row without an answer. Until the exporter serves, they are counted but not sent."""
        self._ping_at = 0.0
        """When to ask next, by the monotonic clock in seconds."""
        self._serving_since = 0.0
        """When this exporter began to serve; 0 until then."""
        self.has_served = False
        """Whether this exporter or one before it has served."""
        self._lost: Exporter | None = None
        """The lost exporter, until its process has ended."""
        self._why_lost = ""
        """Why the exporter was given up; empty if its exit code says it."""
        self._start_at = 0.0
        """When to start the next exporter, by the monotonic clock in seconds."""
        self._pause = SHORTEST_PAUSE
        self.trouble = ""
        """Why nothing is served, for people; empty if metrics are served, or are about to be."""
        self.restarts = 0
        self._use(exporter)

    def handle_message(self, message: bytes) -> bool:
        """Handle a message of the exporter, or b"" if its end of the socket is closed.

        Returns whether the message says that the exporter has begun to serve.
        """
        self._unanswered = 0
        if not message:
            self._lose("")
        if message != SERVING or self._serving_since:
            return False
        self._serving_since = time.monotonic()
        self.has_served, self.trouble = True, ""
        return True

    def check_exporter(self) -> None:
        """Ask the exporter for a sign of life, or replace a lost one. To be called at least once a second.

        Raises LockdError if the first exporter ends or hangs before it serves. If it ended by itself, it has
        logged why.
        """
        now = time.monotonic()
        if self.exporter:
            if now >= self._ping_at:
                self._ping_at = now + PING_SECONDS
                self._ping(self.exporter)
        elif self._lost:
            self._check_lost(self._lost, now)
        elif now >= self._start_at:
            self._replace()

    def end(self) -> None:
        """End all exporters and wait for that, for some seconds at most."""
        for exporter in (self.exporter, self._lost):
            if exporter:
                exporter.end()
        self.exporter = self._lost = None

    def _use(self, exporter: Exporter) -> None:
        exporter.serve()
        self.exporter = exporter
        self._serving_since = self._ping_at = 0.0
        self._unanswered = 0

    def _ping(self, exporter: Exporter) -> None:
        longest = LONGEST_SILENCE if self._serving_since else LONGEST_START
        if self._unanswered == longest:
            self._lose(f"has said nothing for {longest * PING_SECONDS:g} s")
            exporter.kill()
            return
        self._unanswered += 1
        if self._serving_since:
            with contextlib.suppress(OSError):  # the exporter's socket is full, or the exporter is gone
                exporter.control.send(PING)

    def _lose(self, why: str) -> None:
        if not self.exporter:
            return
        self.exporter.close()
        self.exporter, self._lost, self._why_lost = None, self.exporter, why
        if self._serving_since and time.monotonic() - self._serving_since > self._pause:
            self._pause = SHORTEST_PAUSE
        self._start_later()

    def _start_later(self) -> None:
        self._start_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _check_lost(self, exporter: Exporter, now: float) -> None:
        code = exporter.exit_code()
        if code is None:
            # An exporter that is lost before any has served is not replaced: its exit code decides whether
            # systemd starts lockd again. So it gets more time to end.
            if now < self._start_at + (0.0 if self.has_served else EXIT_SECONDS):
                return
            exporter.kill()  # the next one is started even if this one cannot be killed
        why = "has closed its socket and goes on" if code is None else describe_exit(code)
        self.trouble = self._why_lost or why
        self._lost = None
        if not self.has_served:
            kind = LockdError if code is None else error_class(code)
            raise kind(f"exporter: {self.trouble} before it served anything")

    def _replace(self) -> None:
        log.error("exporter: %s; starting another", self.trouble)
        try:
            self._use(self._start())
        except OSError as error:  # no processes or descriptors left, which may pass
            self.trouble = f"cannot be started: {error.strerror}"
            self._start_later()
        else:
            self.restarts += 1


def check_web_config(path: Path) -> None:
    """Raise an error if the exporter cannot use this web configuration as the user that it runs as.

    It is a ConfigError if the file is at fault, and a HostError if this host cannot run the exporter.
    """
    command = [*isolation.command("lockd.export"), "--check", "--web-config", str(path)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | NO_AUTHORITIES
    )
    if done.returncode:
        raise error_class(done.returncode)(
            done.stdout.strip() or f"{path}: the exporter, which checks it, {describe_exit(done.returncode)}"
        )


def listen(addresses: list[tuple[str, int]]) -> list[socket.socket]:
    """A listening socket for each address. An empty host stands for every interface, by IPv4, and by
    IPv6 if this host has it. A name stands for all of its addresses that this host has.

    Raises LockdError, which names the address, if one of them cannot be listened on.
    """
    sockets: dict[Any, socket.socket] = {}
    for host, port in addresses:
        try:
            _listen(host, port, sockets)
        except OSError as error:
            for opened in sockets.values():
                opened.close()
            # socket.create_server() adds the address to strerror, and this message has it already. The number
            # in a gaierror, for a host name that is not found, is none of os.strerror().
            is_name = isinstance(error, socket.gaierror)
            reason = error.strerror if is_name else os.strerror(error.errno or 0)
            raise LockdError(
                f"{host_port(host, port)}: cannot listen there: {reason}: "
                "choose another with --web.listen-address=HOST:PORT or web.listen"
            ) from error
    return list(sockets.values())


def _listen(host: str, port: int, sockets: dict[Any, socket.socket]) -> None:
    """Add listening sockets for this host to `sockets`, which are by address. Raises OSError."""
    if not host and socket.has_dualstack_ipv6():
        sockets["", port] = socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True
        )
        return
    # For a host that is no bytes object, Python loads its rules for international domain names (0.3 MB).
    name = host.encode() if host.isascii() else host
    found = socket.getaddrinfo(name or b"0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    not_here = None
    for family, _, _, _, address in found:
        if address in sockets:  # such as localhost besides 127.0.0.1
            continue
        try:
            sockets[address] = socket.create_server(address, family=family, backlog=128)
        except OSError as error:
            if error.errno not in ELSEWHERE:
                raise
            not_here = error
            log.warning("%s: not listening at %s: %s", host_port(host, port), address[0], error.strerror)
    if not_here and not any(address in sockets for *_, address in found):
        raise not_here
