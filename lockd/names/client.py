"""The sampler's end of naming: questions to the process that looks names up, and its answers.

That process, the namer, reads other processes' files, which may be large, damaged or hostile. It may be slow
or die; the sampler never waits for it, and starts another.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from lockd.kernel.rings import Ring
from lockd.names.protocol import (
    Answer,
    GoWaits,
    KernelLock,
    Looks,
    NamerSettings,
    Owners,
    Question,
    Reload,
    UserLockSeen,
    decode,
    is_answer_to,
)
from lockd.names.shares import SAVED_SECONDS, Bench, Turn
from lockd.process import isolation
from lockd.process.clock import cpu_seconds

log = logging.getLogger(__name__)

QUEUED = 500
"""Questions that may wait, some with 4 KiB of stack; further ones are refused, and asked again later."""
OUTSTANDING = 64
"""Questions that the namer may have at a time. If it dies, the first of them was the cause."""
ANSWER_SECONDS = 30.0
"""A namer that has not answered one for so long hangs. An emulated machine needs 10 s for its first."""
RESTART_SECONDS = 1.0
MOST_ENDING = 3
"""Namers that were killed and do not end. With so many of them no other is started."""
ENDING_SECONDS = 1.0
"""So long it is waited for that, when lockd itself ends."""
SHARE = 0.25
OWING = 100
MESSAGE_BYTES = 1 << 17
LOOKS = 1000
"""Processes in one message."""


class Resolver:
    """Ask with ask(), fetch what is ready with answers(); neither ever waits.

    `procfs` is the root of a proc file system. By `blocked` the programs tell the namer itself, at once, of
    which processes a thread blocks. `parked` are patterns of the names of locks that threads park on. `share`
    of the namer's time may a process take, and a user.
    """

    def __init__(
        self,
        procfs: Path = Path("/proc"),
        blocked: Ring | None = None,
        parked: Sequence[str] = (),
        share: float = SHARE,
    ) -> None:
        self._procfs, self._blocked, self._parked, self._share = procfs, blocked, parked, share
        self._owing: deque[tuple[Turn, float, float]] = deque(maxlen=OWING)
        """Of whom a namer was lost, for how many seconds, and when."""
        self._ending: list[Namer] = []
        """That were killed and have not ended."""
        self._queue: deque[Question] = deque()
        self._to_look: dict[int, None] = {}
        self._to_forget: dict[int, None] = {}
        self._outstanding: deque[Question] = deque()
        self._answers: list[Answer] = []
        self._namer: Namer | None = None
        self._answered_at = self._start_at = 0.0
        self.is_paused = False
        """Whether questions about names wait; who holds the locks of a deadlock is asked all the same."""
        self._reload: Reload | None = None
        """What the namer is to be told next."""
        self.restarts = 0
        self._cpu_seconds_of_ended = 0.0
        self._refused_by_ended = 0

    @property
    def pid(self) -> int:
        """Of the namer; 0 while there is none."""
        return self._namer.pid if self._namer else 0

    def cpu_seconds(self) -> float:
        """Of all namers so far."""
        return self._cpu_seconds_of_ended + sum(namer.cpu_seconds() for namer in self._all)

    @property
    def refused(self) -> int:
        """Questions about processes that had taken their share of the time, or their users: of all namers."""
        return self._refused_by_ended + sum(namer.refused for namer in self._all)

    @property
    def _all(self) -> list[Namer]:
        return [*self._ending, self._namer] if self._namer else self._ending

    @property
    def room(self) -> int:
        """Questions that may be asked now."""
        return QUEUED - len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to send or to receive, but that the namer has ended."""
        waiting = self._queue or self._to_look or self._to_forget or self._outstanding or self._answers
        return bool(self._namer) and not waiting and not self._reload

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

    def reload(self, share: float) -> None:
        """Go on with another share, and with the level that the log has now."""
        self._share = share
        self._reload = Reload(log.getEffectiveLevel(), share)

    def answers(self) -> list[Answer]:
        """All since the last call. To be called often: it is also what sends the questions."""
        self._exchange()
        ready, self._answers = self._answers, []
        return ready

    def close(self) -> None:
        """End the namer."""
        if self._namer:
            self._end_namer()
        until = time.monotonic() + ENDING_SECONDS
        while self._ending and time.monotonic() < until:
            time.sleep(0.001)
            self._note_ended()

    def _exchange(self) -> None:
        now = time.monotonic()
        self._note_ended()
        if not self._namer and now >= self._start_at and len(self._ending) < MOST_ENDING:
            self._start(now)
        if not self._namer:
            return
        try:
            for message in self._namer.received():
                try:
                    self._note_answer(decode(message), now)
                except ValueError as error:
                    raise NamerGone(f"no answer that can be read: {error}") from error
            if self._outstanding and now - self._answered_at > ANSWER_SECONDS:
                raise NamerGone(f"no answer for {ANSWER_SECONDS:g} s", ANSWER_SECONDS)
            self._send(now)
        except NamerGone as gone:
            self._lost(gone, now)

    def _start(self, now: float) -> None:
        self._reload = None  # it begins with that
        try:
            self._namer = Namer(self._settings(now))
        except OSError as error:  # too many processes or descriptors: that may pass
            log.error("namer: cannot be started: %s; trying again", error.strerror)
            self._start_at = now + RESTART_SECONDS

    def _settings(self, now: float) -> NamerSettings:
        owing = [(turn, max(seconds - self._share * (now - at), 0.0)) for turn, seconds, at in self._owing]
        ring = (self._blocked.fd, self._blocked.size) if self._blocked else None
        return NamerSettings(
            str(self._procfs), log.getEffectiveLevel(), self._parked, self._share, owing, ring
        )

    def _send(self, now: float) -> None:
        assert self._namer
        while (question := self._next()) and self._namer.send(question.encode()):
            if isinstance(question, Reload):
                self._reload = None
                continue
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
        if self._reload:
            return self._reload
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
        if not is_answer_to(answer, self._outstanding[0]):
            raise NamerGone("an answer to another question")
        self._outstanding.popleft()
        self._answered_at = now
        self._answers.append(answer)

    def _lost(self, gone: NamerGone, now: float) -> None:
        """It ended or hangs: answer what it had before it for it, and let another do the rest."""
        assert self._namer
        tgid, _ = turn = self._namer.bench.turn
        self._end_namer()
        culprit = self._outstanding.popleft() if self._outstanding else None
        log.error(
            "namer: %s, while looking at %s; starting another",
            gone,
            culprit.words if culprit else f"process {tgid}" if tgid > 0 else "nothing",
        )
        if tgid > 0:
            self._owing.append((turn, gone.seconds, now))
        if culprit:
            self._answers.append(culprit.fallback())
        self._queue.extendleft(reversed(self._outstanding))
        self._outstanding.clear()
        self.restarts += 1
        self._start_at = now + RESTART_SECONDS

    def _end_namer(self) -> None:
        """Never waits: a kill does not end what waits for a page of a file whose server does not answer."""
        assert self._namer
        self._namer.kill()
        self._ending.append(self._namer)
        self._namer = None

    def _note_ended(self) -> None:
        for namer in [namer for namer in self._ending if namer.has_ended()]:
            self._cpu_seconds_of_ended += namer.cpu_seconds()
            self._refused_by_ended += namer.refused
            self._ending.remove(namer)


class NamerGone(Exception):
    """Says how it ended, and how many seconds whose turn it was has to answer for."""

    def __init__(self, why: str, seconds: float = SAVED_SECONDS) -> None:
        super().__init__(why)
        self.seconds = seconds


class Namer:
    """The process, and our end of the socket to it."""

    def __init__(self, settings: NamerSettings) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        ring = settings.ring[:1] if settings.ring else ()
        with theirs, open(os.memfd_create("lockd-bench"), "r+b", buffering=0) as bench:
            bench.truncate(mmap.PAGESIZE)
            self.bench = Bench(bench.fileno())
            settings = replace(settings, socket=theirs.fileno(), bench=bench.fileno())
            self._child = subprocess.Popen(
                [*isolation.command("lockd.names"), settings.to_json()],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), bench.fileno(), *ring],
                start_new_session=True,  # Ctrl-C on a terminal is for the sampler, which ends it
            )
        self.pid = self._child.pid
        self._refused = 0
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

    @property
    def refused(self) -> int:
        """As in Bench; never less than before, whatever became of it."""
        self._refused = max(self._refused, self.bench.refused)
        return self._refused

    def cpu_seconds(self) -> float:
        """That it has taken so far, and its children, such as who demangles, while they live and after."""
        if self._child.returncode is None:
            with contextlib.suppress(OSError):  # it has just ended: has_ended() will know
                own = cpu_seconds(self.pid)
                children = Path(f"/proc/{self.pid}/task/{self.pid}/children")  # some kernels do not tell
                living = children.read_text().split() if children.exists() else ()
                self._cpu_seconds = max(own + sum(map(cpu_seconds, map(int, living))), self._cpu_seconds)
        return self._cpu_seconds

    def kill(self) -> None:
        """It ends, now or later: see has_ended()."""
        self._socket.close()
        try:
            os.kill(self.pid, signal.SIGKILL)  # nobody has waited for it: its id is still its own
        except PermissionError:  # it is another user's by now; its end of the socket tells it to end
            log.error("namer: process %d cannot be killed without CAP_KILL", self.pid)

    def has_ended(self) -> bool:
        """Of one that was killed. Never waits."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid:
            self._child.returncode = os.waitstatus_to_exitcode(status)
            self._cpu_seconds = max(usage.ru_utime + usage.ru_stime, self._cpu_seconds)
        return pid > 0

    def _how_it_ended(self, otherwise: str) -> str:
        """Leaves it as it is, so that its times can still be had."""
        told = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if not told:
            return otherwise
        if told.si_code == os.CLD_EXITED:
            return f"ended with code {told.si_status}"
        return f"ended by {signal.Signals(told.si_status).name}"
