"""The sampler's end of naming: questions to the process that looks names up, and its answers.

That process, the namer, reads other processes' files, which may be large, damaged or hostile. It may be slow
or die; the sampler never waits for it, and starts another.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from lockd import isolated
from lockd.cpu_clock import cpu_seconds
from lockd.names.messages import Answer, GoWaits, KernelLock, Looks, Owners, Question, UserLockSeen, decode
from lockd.rings import Ring

log = logging.getLogger(__name__)

QUEUED = 500
"""Questions that may wait, some with 4 KiB of stack; further ones are refused, and asked again later."""
OUTSTANDING = 64
"""Questions that the namer may have at a time. If it dies, the first of them was the cause."""
ANSWER_SECONDS = 30.0
"""A namer that has not answered one for so long hangs. An emulated machine needs 10 s for its first."""
RESTART_SECONDS = 1.0
MESSAGE_BYTES = 1 << 17
LOOKS = 1000
"""Processes in one message."""


class Resolver:
    """Ask with ask(), fetch what is ready with answers(); neither ever waits.

    `procfs` is the root of a proc file system. By `blocked` the programs tell the namer itself, at once, of
    which processes a thread blocks. `parked` are patterns of the names of locks that threads park on.
    """

    def __init__(
        self, procfs: Path = Path("/proc"), blocked: Ring | None = None, parked: Sequence[str] = ()
    ) -> None:  # fmt: skip
        self._procfs, self._blocked, self._parked = procfs, blocked, parked
        self._queue: deque[Question] = deque()
        self._to_look: dict[int, None] = {}
        self._to_forget: dict[int, None] = {}
        self._outstanding: deque[Question] = deque()
        self._answers: list[Answer] = []
        self._namer: Namer | None = None
        self._answered_at = self._start_at = 0.0
        self.is_paused = False
        """Whether questions about names wait; who holds the locks of a deadlock is asked all the same."""
        self.restarts = 0
        self._cpu_seconds_of_ended = 0.0

    @property
    def pid(self) -> int:
        """Of the namer; 0 while there is none."""
        return self._namer.pid if self._namer else 0

    def cpu_seconds(self) -> float:
        """Of all namers so far."""
        return self._cpu_seconds_of_ended + (self._namer.cpu_seconds() if self._namer else 0.0)

    @property
    def room(self) -> int:
        """Questions that may be asked now."""
        return QUEUED - len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to send or to receive, but that the namer has ended."""
        waiting = self._queue or self._to_look or self._to_forget or self._outstanding or self._answers
        return bool(self._namer) and not waiting

    def ask(self, question: UserLockSeen | KernelLock | Owners | GoWaits) -> bool:
        """False if too much is being asked for already."""
        if len(self._queue) >= QUEUED:
            return False
        if isinstance(question, Owners):
            self._queue.appendleft(question)  # a deadlock is to be known before what its locks are called
        else:
            self._queue.append(question)
        return True

    def look(self, tgids: Sequence[int], gone: Sequence[int] = ()) -> None:
        """Have the mappings of `tgids` remembered, before those processes end, and the `gone` forgotten.

        What ends while it waits to be looked at is not looked at: only of what lives can there be much to do.
        """
        self._to_look.update(dict.fromkeys(tgids))
        for tgid in gone:
            if tgid in self._to_look:
                del self._to_look[tgid]
            else:
                self._to_forget[tgid] = None

    def answers(self) -> list[Answer]:
        """All since the last call. To be called often: it is also what sends the questions."""
        self._exchange()
        ready, self._answers = self._answers, []
        return ready

    def close(self) -> None:
        """End the namer."""
        if self._namer:
            self._end_namer()

    def _exchange(self) -> None:
        now = time.monotonic()
        if not self._namer and now >= self._start_at:
            self._start(now)
        if not self._namer:
            return
        try:
            for message in self._namer.received():
                try:
                    self._note_answer(decode(message), now)
                except (ValueError, KeyError, TypeError) as error:
                    raise NamerGone(f"no answer that can be read: {error}") from error
            if self._outstanding and now - self._answered_at > ANSWER_SECONDS:
                raise NamerGone(f"no answer for {ANSWER_SECONDS:g} s")
            self._send(now)
        except NamerGone as gone:
            self._lost(str(gone), now)

    def _start(self, now: float) -> None:
        try:
            self._namer = Namer(self._procfs, self._blocked, self._parked)
        except OSError as error:  # too many processes or descriptors: that may pass
            log.error("namer: cannot be started: %s; trying again", error.strerror)
            self._start_at = now + RESTART_SECONDS

    def _send(self, now: float) -> None:
        assert self._namer
        while (question := self._next()) and self._namer.send(question.encode()):
            if isinstance(question, Looks):
                for sent, waiting in ((question.tgids, self._to_look), (question.gone, self._to_forget)):
                    for tgid in sent:
                        del waiting[tgid]
                continue
            self._queue.popleft()
            if not self._outstanding:
                self._answered_at = now
            self._outstanding.append(question)

    def _next(self) -> Question | None:
        """What is to be sent now: who holds locks, then what may end, then names."""
        first = self._queue[0] if self._queue and len(self._outstanding) < OUTSTANDING else None
        if isinstance(first, Owners):
            return first
        if self.is_paused:
            return None
        if self._to_look or self._to_forget:
            return Looks(tuple(islice(self._to_look, LOOKS)), tuple(islice(self._to_forget, LOOKS)))
        return first

    def _note_answer(self, answer: Answer, now: float) -> None:
        if not self._outstanding:
            raise NamerGone("an answer to nothing")
        self._outstanding.popleft()
        self._answered_at = now
        self._answers.append(answer)

    def _lost(self, why: str, now: float) -> None:
        """It ended or hangs: answer what it had before it for it, and let another do the rest."""
        self._end_namer()
        culprit = self._outstanding.popleft() if self._outstanding else None
        log.error(
            "namer: %s, while looking at %s; starting another", why, culprit.words if culprit else "nothing"
        )
        if culprit:
            self._answers.append(culprit.fallback())
        self._queue.extendleft(reversed(self._outstanding))
        self._outstanding.clear()
        self.restarts += 1
        self._start_at = now + RESTART_SECONDS

    def _end_namer(self) -> None:
        assert self._namer
        self._cpu_seconds_of_ended += self._namer.end()
        self._namer = None


class NamerGone(Exception):
    """Says how it ended."""


class Namer:
    """The process, and our end of the socket to it."""

    def __init__(self, procfs: Path, blocked: Ring | None, parked: Sequence[str]) -> None:
        ring = [blocked.fd, blocked.size] if blocked else []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            self._child = subprocess.Popen(
                [
                    *isolated.command("lockd.names"),
                    str(theirs.fileno()),
                    str(procfs),
                    str(log.getEffectiveLevel()),
                    json.dumps(parked),
                    *map(str, ring),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *ring[:1]],
                start_new_session=True,  # Ctrl-C on a terminal is for the sampler, which ends it
            )
        self.pid = self._child.pid
        self._cpu_seconds = 0.0
        self._buffer = memoryview(bytearray(MESSAGE_BYTES))

    def send(self, message: bytes) -> bool:
        """False if there is no room at the moment. Raises NamerGone."""
        try:
            self._socket.send(message)
        except BlockingIOError:
            return False
        except OSError as error:
            raise NamerGone(self._how_it_ended(error.strerror or "")) from error
        return True

    def received(self) -> list[bytes]:
        """Every message there is. Raises NamerGone."""
        messages: list[bytes] = []
        while True:
            try:
                length = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise NamerGone(self._how_it_ended(error.strerror or "")) from error
            if not length:
                if messages:
                    return messages  # the next call tells
                raise NamerGone(self._how_it_ended("its socket is closed"))
            messages.append(bytes(self._buffer[:length]))

    def cpu_seconds(self) -> float:
        """That it has taken so far."""
        with contextlib.suppress(OSError):  # it has just ended: end() will know
            self._cpu_seconds = cpu_seconds(self.pid)
        return self._cpu_seconds

    def end(self) -> float:
        """Seconds of CPU that it took."""
        self._socket.close()
        os.kill(self.pid, signal.SIGKILL)  # nobody has waited for it: its id is still its own
        _, status, usage = os.wait4(self.pid, 0)
        self._child.returncode = os.waitstatus_to_exitcode(status)
        return usage.ru_utime + usage.ru_stime

    def _how_it_ended(self, otherwise: str) -> str:
        """Leaves it as it is, so that its times can still be had."""
        told = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if not told:
            return otherwise
        if told.si_code == os.CLD_EXITED:
            return f"ended with code {told.si_status}"
        return f"ended by {signal.Signals(told.si_status).name}"
