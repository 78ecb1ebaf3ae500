"""The sampler's side of naming: sends questions to the namer, and starts and ends namers.

The namer reads other processes' files, which may be large, damaged or hostile. It may be slow or die. The
sampler never waits for it. A namer takes memory that nobody needs on a quiet host, so it is ended when
nothing has needed it for a while, and the next question that needs one starts another.
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
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from pathlib import Path

from lockd.kernel.rings import Ring
from lockd.names.blocked_processes import BlockedProcesses
from lockd.names.known_kernel_locks import KnownKernelLocks
from lockd.names.protocol import (
    Answer,
    Asked,
    KernelLock,
    LockAnswer,
    NamerSettings,
    Owners,
    Question,
    Reload,
    Watch,
    decode_answer,
    is_answer_to,
)
from lockd.names.shares import ANSWER_SECONDS, SAVED_SECONDS, Bench, Turn
from lockd.process import isolation, memory
from lockd.process.clock import cpu_seconds_with_children

log = logging.getLogger(__name__)

QUEUED = 500
"""The most questions that wait to be sent, some with 4 KiB of stack. ask() refuses further questions, except
for Owners; the caller asks again later."""
OUTSTANDING = 64
"""The most questions that are sent and not answered. If the namer dies, the oldest of them counts as the
cause."""
STALLED_SECONDS = 15.0
"""Seconds from one call of Resolver.answers() to the next after which lockd counts as frozen meanwhile, as by
`systemctl freeze`. The namer is frozen with the sampler. The longest regular time between two calls is 10 s,
the longest `period`."""
RESTART_SECONDS, LONGEST_RESTART_SECONDS = 1.0, 8.0
"""Seconds from the loss of a namer to the start of the next: the first pause and the longest one.

The pause doubles with each loss, until a namer has answered a question. A start takes 0.25 s of CPU time, and
a lack of memory, for instance, may end every namer at its start. The longest pause is short, because no
deadlock is found during a pause.
"""
QUIET_SECONDS = 180.0
"""Seconds without a question that needs the namer, after which it is ended. A start takes 0.25 s of CPU time,
so a namer should not come and go with every job of a host."""
MOST_ENDING = 3
"""The number of killed namers that have not ended, at which no other namer is started. Each keeps its memory
for as long as it hangs. One user can make only one of them hang, see Shares.hold(). A user can have ids that
lockd does not know of (SubordinateIds), and so be several users."""
CLOSED_SECONDS = 1.0
"""Seconds that a namer may take to end after it has closed its socket."""
ENDING_SECONDS = 1.0
"""Seconds to wait for the end of the namers when lockd itself ends."""
SHARE = 0.25
"""The part of a CPU's time that the namer may spend on one process, and on one user."""
OWING = 100
"""The most turns to remember in which a namer was lost. A turn is the namer's work for one process."""
MESSAGE_BYTES = 1 << 17
"""The size of the largest answer in bytes."""
WATCHED = 1000
"""The most processes to remember, and the most processes to forget, that one Watch message has."""


class Resolver:
    """Asks the namer with ask(), and returns its answers with answers(). Neither method ever waits.

    The first call of answers() starts a namer, before there is a question: some programs live no longer than
    a namer takes to start. When no question has needed the namer for `quiet_seconds`, it is ended. It then
    rests: there is no namer until a question needs one.

    `procfs` is the root of a proc file system. `blocked` is the ring by which the BPF programs tell the namer
    at once in which processes a thread blocks. `parked` are shell patterns of the names of locks that idle
    threads park on. `share` is the part of a CPU's time that the namer may spend on one process, and on one
    user.
    """

    def __init__(
        self,
        procfs: Path = Path("/proc"),
        blocked: Ring | None = None,
        parked: Sequence[str] = (),
        share: float = SHARE,
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        self._quiet_seconds, self._needed_at = quiet_seconds, time.monotonic()
        self._is_resting = False
        """Whether there is no namer because nothing needs one."""
        self._procfs, self._blocked, self._parked, self._share = procfs, blocked, parked, share
        self._owing: deque[tuple[Turn, float, float]] = deque(maxlen=OWING)
        """Turns in which a namer was lost, each with the seconds that are charged for it, and the time of the
        loss (time.monotonic())."""
        self._ending: dict[Namer, Turn] = {}
        """Namers that were killed and have not ended, each with the process that it worked for, and the user.
        """
        self._is_held_up = False
        """Whether it was logged that no namer is started because too many have not ended."""
        self._queue: deque[Asked] = deque()
        self._to_watch: dict[int, None] = {}
        self._to_forget: dict[int, None] = {}
        """Processes that the namer has not yet been told to remember (_to_watch) or to forget (_to_forget),
        in the order of sending. The values of both dicts mean nothing."""
        self._watched: set[int] = set()
        """Processes that the present namer remembers, and those in _to_watch."""
        self._outstanding: deque[Asked] = deque()
        """Questions that were sent and not answered, oldest first."""
        self._answers: list[Answer] = []
        self._known_kernel_locks = KnownKernelLocks()
        self._namer: Namer | None = None
        self._answered_at = self._start_at = 0.0
        self._exchanged_at = inf
        """When answers() was last called (time.monotonic())."""
        self._pause = RESTART_SECONDS
        """Seconds from the loss of the present namer to the start of the next."""
        self.is_paused = False
        """Whether all questions wait, except those about the holders of locks (Owners). CpuBudget sets this
        flag to save CPU time."""
        self._reload: Reload | None = None
        """Settings that are to be sent next; None if the namer has the present ones."""
        self.restarts = 0
        """The number of namers that were lost and replaced."""
        self._cpu_seconds_of_ended = 0.0
        self._refused_by_ended = 0

    @property
    def pid(self) -> int:
        """The process id of the namer; 0 while there is none."""
        return self._namer.pid if self._namer else 0

    def cpu_seconds(self) -> float:
        """Seconds of CPU time that all namers so far have taken."""
        return self._cpu_seconds_of_ended + sum(namer.cpu_seconds() for namer in self._all)

    @property
    def refused(self) -> int:
        """The number of turns that all namers so far have refused. A turn is the work for one process.

        A turn is refused if the process or its user has used up its share, or if another namer hangs in a
        turn of this process or user.
        """
        return self._refused_by_ended + sum(namer.refused for namer in self._all)

    @property
    def _all(self) -> list[Namer]:
        return [*self._ending, self._namer] if self._namer else [*self._ending]

    @property
    def _held(self) -> tuple[Turn, ...]:
        """For each killed namer that has not ended, the process that it hangs on, with its user, if known."""
        return tuple(turn for turn in self._ending.values() if turn[0] > 0)

    @property
    def room(self) -> int:
        """The number of questions that can be queued now."""
        return max(QUEUED - len(self._queue), 0)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to send, no answer to expect or to return, and no namer to start."""
        waiting = self._queue or self._to_watch or self._to_forget or self._outstanding or self._answers
        return bool(self._namer or self._is_resting) and not waiting and not self._reload

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has needed a namer for `quiet_seconds`. If there is one, it will soon be ended."""
        return time.monotonic() - self._needed_at > self._quiet_seconds

    def ask(self, question: Asked, is_needed: bool = True) -> bool:
        """Queue a question. Returns False, without queueing it, if too many questions wait.

        `is_needed` is False if a good answer is already known. Such a question neither starts nor keeps a
        namer. It is not queued, and the result is False, if nothing has needed a namer for `quiet_seconds`.
        """
        now = time.monotonic()
        # A question about holders is queued even if the queue is full, so that deadlocks are found however
        # many locks have no name. It replaces the one before: the sampler takes the last answer only.
        is_full = len(self._queue) >= QUEUED and not isinstance(question, Owners)
        if is_full or (not is_needed and self.is_quiet):
            return False
        if is_needed:
            self._needed_at, self._is_resting = now, False
        if isinstance(question, Owners):
            while self._queue and isinstance(self._queue[0], Owners):
                self._queue.popleft()  # while no namer can run, the sampler asks again every two minutes
            self._queue.appendleft(question)  # a deadlock is to be known before the names of its locks
        else:
            self._queue.append(question)
        return True

    def known_answer(self, question: KernelLock) -> LockAnswer | None:
        """The answer to a question, derived from earlier answers; None if the namer has to be asked.

        If the earlier answer is old, the namer is asked as well, unless nothing has needed it for a while.
        """
        known = self._known_kernel_locks.find(question)
        if known is None:
            return None
        if self._known_kernel_locks.is_due(question, time.monotonic()):
            self.ask(question, is_needed=False)
        return replace(known, key=question.key)

    def watch(self, tgids: Iterable[int]) -> None:
        """Have the namer remember what these processes have mapped, unless it already does.

        Nothing is done while there is no namer because nothing needs one.
        """
        if not self._is_resting:
            fresh = [tgid for tgid in tgids if tgid not in self._watched]
            self._to_watch.update(dict.fromkeys(fresh))
            self._watched.update(fresh)

    def forget_ended(self, alive: set[int]) -> None:
        """Have the namer forget all processes but those in `alive`.

        If a process ended before its id was sent to the namer, its id is not sent at all. This keeps the work
        bounded by the number of living processes.
        """
        for tgid in self._watched - alive:
            if tgid in self._to_watch:
                del self._to_watch[tgid]
            else:
                self._to_forget[tgid] = None
        self._watched &= alive

    def reload(self, share: float) -> None:
        """Send the namer another share, and the log level of this process."""
        self._share = share
        self._send_settings()

    def _send_settings(self) -> None:
        if not self._is_resting:  # after a rest, the next namer starts with the present settings anyway
            self._reload = Reload(log.getEffectiveLevel(), self._share, self._held)

    def answers(self) -> list[Answer]:
        """All answers since the last call. Must be called often, as it also sends the queued questions."""
        self._exchange()
        ready, self._answers = self._answers, []
        return ready

    def close(self) -> None:
        """End the namer. Wait at most ENDING_SECONDS until it and all killed namers have ended."""
        if self._namer:
            self._end_namer()
        until = time.monotonic() + ENDING_SECONDS
        while self._ending and time.monotonic() < until:
            time.sleep(0.001)
            self._note_ended()

    def _exchange(self) -> None:
        now = time.monotonic()
        if now - self._exchanged_at > STALLED_SECONDS:
            self._answered_at = now  # the namer did not run either, and no process is the cause
        self._exchanged_at = now
        self._note_ended()
        if self._is_resting:
            self._discard_blocked()
        elif not self._namer and now >= self._start_at:
            if len(self._ending) < MOST_ENDING:
                self._start(now)
            elif not self._is_held_up:
                self._is_held_up = True
                self._log_held_up()
        if not self._namer:
            return
        try:
            for message in self._namer.receive():
                try:
                    self._note_answer(decode_answer(message), now)
                except ValueError as error:
                    raise NamerGone(f"no answer that can be read: {error}") from error
            if self._outstanding and now - self._answered_at > ANSWER_SECONDS:
                raise NamerGone(f"no answer for {ANSWER_SECONDS:g} s", ANSWER_SECONDS)
            self._send(now)
        except NamerGone as gone:
            self._replace_namer(gone, now)
        if self._namer and self.is_idle and self.is_quiet:
            log.debug("namer: ended, as nothing has needed it for %g s", self._quiet_seconds)
            self._end_namer()
            self._is_resting = True

    def _log_held_up(self) -> None:
        hung = (f"{namer.pid} with process {tgid}" for namer, (tgid, _) in self._ending.items())
        log.error(
            "namer: cannot be started: %d namers were killed and have not ended (%s); rule: fewer than %d;"
            " until one of them ends, new locks have no names, and no deadlocks are found",
            len(self._ending), ", ".join(hung), MOST_ENDING,
        )  # fmt: skip

    def _discard_blocked(self) -> None:
        """Empty the ring of blocked processes while no namer reads it.

        The next namer would read what all these processes have mapped before it answered anything, and the
        ring would have no room for processes that block then. Records that are written after the last call
        stay for the next namer: among them is the process because of which it is started.
        """
        if self._blocked and not self._ending:  # a killed namer may still be reading the ring
            with contextlib.suppress(OSError):  # a kernel that refuses the ring refuses it to namers as well
                BlockedProcesses(self._blocked).read()

    def _start(self, now: float) -> None:
        self._reload = None  # a new namer begins with these settings
        try:
            self._namer = Namer(self._settings(now))
        except OSError as error:  # too many processes or descriptors: that may pass
            log.error("namer: cannot be started: %s; trying again", error.strerror)
            self._delay_start(now)

    def _delay_start(self, now: float) -> None:
        self._start_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_RESTART_SECONDS)

    def _settings(self, now: float) -> NamerSettings:
        owing = [
            (turn, max(seconds - self._share * (now - since), 0.0)) for turn, seconds, since in self._owing
        ]
        ring = (self._blocked.fd, self._blocked.size) if self._blocked else None
        return NamerSettings(
            str(self._procfs),
            log.getEffectiveLevel(),
            self._parked,
            self._share,
            owing,
            ring,
            held=self._held,
        )

    def _send(self, now: float) -> None:
        assert self._namer
        while (question := self._next()) and self._namer.send(question.encode()):
            if isinstance(question, Reload):
                self._reload = None
                continue
            if isinstance(question, Watch):
                for sent, waiting in ((question.tgids, self._to_watch), (question.gone, self._to_forget)):
                    for tgid in sent:
                        del waiting[tgid]
                continue
            self._queue.popleft()
            if not self._outstanding:
                self._answered_at = now
            self._outstanding.append(question)

    def _next(self) -> Question | None:
        """The question to send next; None if none can be sent now.

        Settings come first, then Owners, then Watch, then all other questions.
        """
        if self._reload:
            return self._reload
        first = self._queue[0] if self._queue and len(self._outstanding) < OUTSTANDING else None
        if isinstance(first, Owners):
            return first
        if self.is_paused:
            return None
        if self._to_watch or self._to_forget:
            return self._next_watch()
        return first

    def _next_watch(self) -> Watch:
        """The next processes to remember and to forget.

        The id of a process that ended may belong to a new process by now. Such an id is put into both lists
        of one message. If a later message had the namer forget the ended process, the namer would forget the
        new one, and would not be told to remember it again.
        """
        tgids = tuple(islice(self._to_watch, WATCHED))
        used_again = [tgid for tgid in tgids if tgid in self._to_forget]
        gone = dict.fromkeys([*used_again, *islice(self._to_forget, WATCHED)])
        return Watch(tgids, tuple(islice(gone, WATCHED)))

    def _note_answer(self, answer: Answer, now: float) -> None:
        if not self._outstanding:
            raise NamerGone("an answer to nothing")
        if not is_answer_to(answer, self._outstanding[0]):
            raise NamerGone("an answer to another question")
        question = self._outstanding.popleft()
        if isinstance(question, KernelLock) and isinstance(answer, LockAnswer):
            self._known_kernel_locks.remember(question, answer, now)
        self._answered_at, self._pause = now, RESTART_SECONDS
        self._answers.append(answer)

    def _replace_namer(self, gone: NamerGone, now: float) -> None:
        """End a namer that died or hangs: answer its present question with a fallback, ask the rest again."""
        assert self._namer
        tgid, _ = turn = self._namer.bench.turn  # the process whose files the namer was reading
        self._end_namer()
        culprit = self._outstanding.popleft() if self._outstanding else None
        about = culprit.description if culprit else "nothing"
        # The process may have come from the ring of blocked processes, and not from the question.
        if tgid > 0 and tgid != getattr(culprit, "tgid", 0):
            about = f"process {tgid}" + (f", before {about}" if culprit else "")
        log.error("namer: %s, while looking at %s; starting another", gone, about)
        if tgid > 0:
            self._owing.append((turn, gone.seconds, now))
        if culprit:
            self._answers.append(culprit.fallback())
        waiting = [*self._outstanding, *self._queue]
        self._queue = deque(sorted(waiting, key=lambda one: not isinstance(one, Owners)))
        self._outstanding.clear()
        self.restarts += 1
        self._delay_start(now)

    def _end_namer(self) -> None:
        """Kill the namer without waiting for its end: it may wait for a page of a file for ever."""
        assert self._namer
        self._namer.kill()
        self._ending[self._namer] = self._namer.bench.turn
        self._namer = None
        self._watched = set(self._to_watch)
        self._to_forget.clear()

    def _note_ended(self) -> None:
        held = self._held
        for namer in [namer for namer in self._ending if namer.has_ended()]:
            self._cpu_seconds_of_ended += namer.cpu_seconds()
            self._refused_by_ended += namer.refused
            del self._ending[namer]
        if len(self._ending) < MOST_ENDING:
            self._is_held_up = False
        if self._namer and self._held != held:
            self._send_settings()


class NamerGone(Exception):
    """The namer ended or hangs. `seconds` is what to charge to the process that the namer worked for."""

    def __init__(self, why: str, seconds: float = SAVED_SECONDS) -> None:
        super().__init__(why)
        self.seconds = seconds


class Namer:
    """The process of a namer, and the sampler's end of the socket to it.

    The constructor starts the process, and raises OSError if that fails.
    """

    def __init__(self, settings: NamerSettings) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        ring = settings.ring[:1] if settings.ring else ()
        with (
            theirs,
            open(memory.create_file("lockd-bench"), "r+b", buffering=0) as bench,
            open(memory.create_file("lockd-namer-settings"), "r+b", buffering=0) as asked,
        ):
            bench.truncate(mmap.PAGESIZE)
            self.bench = Bench(bench.fileno())
            settings = replace(settings, socket=theirs.fileno(), bench=bench.fileno())
            # The kernel refuses an argument of more than 128 KiB, which many patterns exceed.
            os.pwrite(asked.fileno(), settings.to_json(), 0)
            self._child = subprocess.Popen(
                [*isolation.command("lockd.names"), str(asked.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), bench.fileno(), asked.fileno(), *ring],
                start_new_session=True,  # Ctrl-C on a terminal is for the sampler, which then ends the namer
            )
        self.pid = self._child.pid
        self._refused = 0
        self._cpu_seconds = 0.0
        self._closed_at = 0.0
        """The monotonic time when the namer was first seen to have closed its socket; 0 before that."""
        self._buffer = memoryview(bytearray(MESSAGE_BYTES))

    def send(self, message: bytes) -> bool:
        """Send a message. Returns False if the socket is full, or if the namer has closed it.

        If the namer has closed the socket, a later receive() raises NamerGone. This method raises NamerGone
        if the message cannot be sent for another reason.
        """
        try:
            self._socket.send(message)
        except (BlockingIOError, ConnectionError):
            return False
        except OSError as error:
            raise NamerGone(f"a question cannot be sent: {error.strerror}") from error
        return True

    def receive(self) -> list[bytes]:
        """Every message that has arrived. If there is none and the socket is closed, calls _note_closed()."""
        messages: list[bytes] = []
        while True:
            try:
                length = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return messages
            except OSError:
                length = 0
            if not length:
                if not messages:  # otherwise the next call notes that the socket is closed
                    self._note_closed()
                return messages
            messages.append(bytes(self._buffer[:length]))

    def _note_closed(self) -> None:
        """Raise NamerGone once it is known how the process ended, or CLOSED_SECONDS after the first call.

        A process that ends closes its socket some moments before it can be waited for.
        """
        now = time.monotonic()
        self._closed_at = self._closed_at or now
        how = self._how_it_ended()
        if how or now >= self._closed_at + CLOSED_SECONDS:
            raise NamerGone(how or "its socket is closed")

    @property
    def refused(self) -> int:
        """The number of turns that this namer has refused, read from the memory that it shares (Bench).

        The number never falls, even if a namer that an attacker controls writes a smaller one.
        """
        self._refused = max(self._refused, self.bench.refused)
        return self._refused

    def cpu_seconds(self) -> float:
        """Seconds of CPU time that the namer and its children, living and ended, have taken so far."""
        if self._child.returncode is None:
            with contextlib.suppress(OSError):  # the namer has just ended: has_ended() will read its CPU time
                own = cpu_seconds_with_children(self.pid)
                children = Path(f"/proc/{self.pid}/task/{self.pid}/children")  # some kernels lack this file
                living = children.read_text().split() if children.exists() else ()
                of_living = sum(map(cpu_seconds_with_children, map(int, living)))
                self._cpu_seconds = max(own + of_living, self._cpu_seconds)
        return self._cpu_seconds

    def kill(self) -> None:
        """Kill the namer without waiting for its end, see has_ended()."""
        self._socket.close()
        try:
            os.kill(self.pid, signal.SIGKILL)  # nobody has waited for the process: the id is still its own
        except PermissionError:  # the namer runs as another user by now; the closed socket makes it end
            log.error("namer: process %d cannot be killed without CAP_KILL", self.pid)

    def has_ended(self) -> bool:
        """Whether a killed namer has ended. Never waits. Not to be called again once it was True."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid:
            self._child.returncode = os.waitstatus_to_exitcode(status)
            self._cpu_seconds = max(usage.ru_utime + usage.ru_stime, self._cpu_seconds)
        return pid > 0

    def _how_it_ended(self) -> str:
        """How the process ended; empty if it has not. Its CPU times can still be read afterwards."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if not status:
            return ""
        if status.si_code == os.CLD_EXITED:
            return f"ended with code {status.si_status}"
        return f"ended by {signal.Signals(status.si_status).name}"
