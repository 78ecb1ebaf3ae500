"""The namer process: answers what locks are called and who holds them, one question after another.

`python3 lockd/process/isolation.py lockd.names SETTINGS`

It reads files that anybody may have written. What goes wrong there ends at most this process: its memory is
limited, it has no descriptors but the socket, the ring of blocked processes and what the scheduler says of
itself, it runs as an unprivileged user with those capabilities of its parent's that are for reading, and a
filter of system calls lets it open files for reading and do little else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockd import logs
from lockd.errors import LockdError
from lockd.kernel.rings import Ring
from lockd.names.blocked_processes import BlockedProcesses
from lockd.names.kernel.kernel_locks import KernelNames
from lockd.names.locks.owners import owner_of_user_lock
from lockd.names.locks.user_locks import UserNames
from lockd.names.protocol import (
    Answer,
    GoWaits,
    GoWaitsAnswer,
    KernelLock,
    LockAnswer,
    Looks,
    NamerSettings,
    OwnedLock,
    Owners,
    OwnersAnswer,
    Question,
    Reload,
    UserLockSeen,
    decode_question,
    encode_answer,
)
from lockd.names.shares import Bench, Shares
from lockd.process import confinement, memory, privileges

log = logging.getLogger(__name__)

READING = {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG"}
MEMORY_BYTES = 512 << 20
"""Of its own, not counting files that it maps."""
MESSAGE_BYTES = 1 << 17
REST_MS = 1000
ASKED_SECONDS = 10.0
"""After a thread of a process blocked; whoever has not asked for the process by then never will."""


class Names:
    """Everything that can be asked. `clock` counts seconds."""

    def __init__(
        self,
        procfs: Path,
        shares: Shares,
        clock: Callable[[], float] = time.monotonic,
        parked: Sequence[str] = (),
    ) -> None:
        self._procfs, self._shares, self._clock = procfs, shares, clock
        self._user = UserNames(procfs, parked=parked)
        self._kernel = KernelNames(procfs)
        self._looked: set[int] = set()
        self._blocked: dict[int, float] = {}
        self._forget_at = 0.0

    def look_at_blocked(self, tgids: Sequence[int]) -> None:
        """A thread of each of these has just blocked: they may end before they are asked about."""
        now = self._clock()
        for tgid in tgids:
            self._blocked[tgid] = now
            try:
                self._look(tgid)
            except Exception:  # as in serve()
                log.exception("the mappings of process %d", tgid)
        if tgids and now >= self._forget_at:
            self._forget_at = now + ASKED_SECONDS
            self._forget(now)

    def answer(self, question: Question) -> Answer | None:
        """None if none is wanted."""
        match question:
            case UserLockSeen():
                with self._shares.turn(question.tgid) as is_left:
                    return self._user_lock(question) if is_left else question.fallback()
            case KernelLock():
                return self._kernel.answer(question)
            case Owners():
                return OwnersAnswer(question.token, tuple(map(self._owner, question.locks)))
            case GoWaits():
                return GoWaitsAnswer(question.tgids, tuple(map(self._go_waited_ns, question.tgids)))
            case Looks():
                self._looked = self._looked - set(question.gone) | set(question.tgids)
                self._forget(self._clock())
                for tgid in question.tgids:
                    self._look(tgid)
            case Reload():
                logs.set_level(question.log_level)
                self._shares.share = question.share
        return None

    def _look(self, tgid: int) -> None:
        with self._shares.turn(tgid) as is_left:
            if is_left:
                self._user.look(tgid)

    def _user_lock(self, question: UserLockSeen) -> LockAnswer:
        lock = question.tgid, question.tid, question.address, question.guess
        if question.sleeper:
            known = self._user.name_of_sleeper(*lock, question.sleeper)
        else:
            known = self._user.name(*lock, question.capture)
        return LockAnswer(question.key, True, **vars(known))

    def _owner(self, lock: OwnedLock) -> int:
        with self._shares.turn(lock.tgid) as is_left:
            return owner_of_user_lock(self._procfs, **vars(lock)) if is_left else 0

    def _go_waited_ns(self, tgid: int) -> int:
        with self._shares.turn(tgid) as is_left:
            return self._user.go_waited_ns(tgid) if is_left else -1

    def rest(self) -> None:
        """Nobody asks at the moment: keep no child, whose CPU time is known once it has ended."""
        self._user.rest()

    def _forget(self, now: float) -> None:
        """All but the processes that the sampler speaks of, or that it may soon ask about."""
        self._blocked = {tgid: at for tgid, at in self._blocked.items() if at > now - ASKED_SECONDS}
        wanted = self._looked | self._blocked.keys()
        self._user.keep(wanted)
        self._shares.keep(wanted)


def serve(sock: socket.socket, names: Names, blocked: BlockedProcesses | None = None) -> None:
    """Until the sampler closes its end. What may end at any moment comes before each question."""
    ready = select.poll()
    for one in (sock, blocked):
        if one:
            ready.register(one, select.POLLIN)
    while True:
        events = ready.poll(REST_MS)
        if not events:
            names.rest()
            events = ready.poll()
        if blocked:
            names.look_at_blocked(blocked.read())
        if sock.fileno() not in (fd for fd, _ in events):
            continue
        message = sock.recv(MESSAGE_BYTES)
        if not message:
            return
        question = decode_question(message)
        try:
            answer = names.answer(question)
        except Exception:  # one strange process must not end the naming of all others
            log.exception("%s", question.words)
            answer = question.fallback() if question.wants_answer else None
        if answer:
            sock.send(encode_answer(answer))


def blocked_processes(ring: Ring) -> BlockedProcesses | None:
    """None if the kernel refuses it."""
    try:
        return BlockedProcesses(ring)
    except OSError as error:
        log.warning(
            "the ring buffer of blocked processes cannot be read: %s;"
            " locks of processes that end at once stay without names", error.strerror
        )  # fmt: skip
        return None


def main() -> int:
    """Until the sampler closes its end, or ends; the exit code."""
    parent = os.getppid()
    settings = NamerSettings.from_json(sys.argv[1])
    sock = socket.socket(fileno=settings.socket)
    logs.setup(settings.log_level, process="namer")
    try:
        privileges.keep_only(READING & privileges.capabilities(), privileges.unprivileged_user("lockd-namer"))
        privileges.die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it could be noticed
            return 0
        memory.keep_little()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        confinement.confine(confinement.NAMER, log_is_journal=logs.open_journal())
    except LockdError as error:
        log.error("%s", error)
        return error.exit_code
    procfs, ring = Path(settings.procfs), settings.ring
    shares = Shares(procfs, settings.share, Bench(settings.bench), settings.owing)
    os.close(settings.bench)
    names = Names(procfs, shares, parked=settings.parked)
    with contextlib.suppress(ConnectionError):  # the sampler closed its end without reading every answer
        serve(sock, names, blocked_processes(Ring(*ring)) if ring else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
