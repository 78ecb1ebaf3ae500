"""The exporter as a child process: started, told what to serve, asked whether it lives, and replaced."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from lockd.errors import ConfigError, LockdError, error_of, how_it_ended
from lockd.messages import PING, RELOAD, SERVE, SERVING
from lockd.process import isolation

log = logging.getLogger(__name__)

ENDING_SECONDS = 3.0
KILLED_SECONDS = 2.0
"""Until what was killed is gone."""
NO_AUTHORITIES = {"SSL_CERT_FILE": os.devnull}
"""tornado, once imported, reads the certificates of all authorities that the host trusts: a fifth of the
exporter's start, for clients of other servers, which it never is."""
PING_SECONDS = 2.0
"""Between two questions whether it is alive."""
LONGEST_SILENCE, LONGEST_START = 15, 60
"""Questions in a row without an answer after which it hangs: of one that serves; of one that does not yet, as
an overloaded host takes long to start Python. They are counted, as time also passes while this process is
stopped, in which nothing is asked."""
SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds from the end of one to the start of the next: twice as long each time, until one has served for
longer than that. Never none: whoever ends all processes of a service may end this one last."""


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
            arguments = [*isolation.command("lockd.export"), "--control-fd", str(theirs.fileno())]
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


class Supervisor:
    """To be asked to look() at every tick. Never waits: not for an answer, and not for an end."""

    def __init__(self, start: Callable[[], Exporter], exporter: Exporter) -> None:
        """`exporter` has been started; there is something to serve from now on."""
        self._start_another = start
        self.exporter: Exporter | None = None
        """None from the loss of one to the start of the next."""
        self._unanswered = 0
        self._ask_at = 0.0
        self._serving_since = 0.0
        """0 until it serves."""
        self.has_served = False
        """This one, or one before it."""
        self._lost: Exporter | None = None
        """The last one, until it has ended."""
        self._why_lost = ""
        """Empty if it is its end that tells."""
        self._start_at = 0.0
        self._pause = SHORTEST_PAUSE
        self.trouble = ""
        """Why nothing is served, in words; empty if something is, or is about to be."""
        self.restarts = 0
        self._use(exporter)

    def note(self, message: bytes) -> bool:
        """What the exporter says, b"" if its end of the socket is closed; whether it has begun to serve."""
        self._unanswered = 0
        if not message:
            self._lose("")
        if message != SERVING or self._serving_since:
            return False
        self._serving_since = time.monotonic()
        self.has_served, self.trouble = True, ""
        return True

    def look(self) -> None:
        """Raises LockdError if the first one ends before it serves; why it did, it has logged itself."""
        now = time.monotonic()
        if self.exporter:
            if now >= self._ask_at:
                self._ask_at = now + PING_SECONDS
                self._ask(self.exporter)
        elif self._lost:
            self._look_at_lost(self._lost, now)
        elif now >= self._start_at:
            self._replace()

    def end(self) -> None:
        """Wait, for some seconds at most, until there is none."""
        for one in (self.exporter, self._lost):
            if one:
                one.end()
        self.exporter = self._lost = None

    def _use(self, exporter: Exporter) -> None:
        exporter.serve()
        self.exporter = exporter
        self._serving_since = self._ask_at = 0.0
        self._unanswered = 0

    def _ask(self, exporter: Exporter) -> None:
        longest = LONGEST_SILENCE if self._serving_since else LONGEST_START
        if self._unanswered == longest:
            self._lose(f"has said nothing for {longest * PING_SECONDS:g} s")
            exporter.kill()
            return
        self._unanswered += 1
        if self._serving_since:
            with contextlib.suppress(OSError):  # it has not read the last ones, or is gone
                exporter.control.send(PING)

    def _lose(self, why: str) -> None:
        if not self.exporter:
            return
        self.exporter.let_go()
        self.exporter, self._lost, self._why_lost = None, self.exporter, why
        if self._serving_since and time.monotonic() - self._serving_since > self._pause:
            self._pause = SHORTEST_PAUSE
        self._start_later()

    def _start_later(self) -> None:
        self._start_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _look_at_lost(self, exporter: Exporter, now: float) -> None:
        code = exporter.code()
        if code is None:
            if now < self._start_at:
                return
            exporter.kill()  # and another is started, whether this one can be killed or not
        why = "has closed its socket and goes on" if code is None else how_it_ended(code)
        self.trouble = self._why_lost or why
        self._lost = None
        if not self.has_served:
            kind = LockdError if code is None else error_of(code)
            raise kind(f"exporter: {self.trouble} before it served anything")

    def _replace(self) -> None:
        log.error("exporter: %s; starting another", self.trouble)
        try:
            self._use(self._start_another())
        except OSError as error:  # too many processes or descriptors: that may pass
            self.trouble = f"cannot be started: {error.strerror}"
            self._start_later()
        else:
            self.restarts += 1


def check_web_config(path: Path) -> None:
    """Raises ConfigError if the exporter, as the user that it runs as, could not use it."""
    command = [*isolation.command("lockd.export"), "--check", "--web-config", str(path)]
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
