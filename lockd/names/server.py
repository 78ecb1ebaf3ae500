"""The namer: answers which names locks have and which threads hold them, one question after another.

The namer reads files that anybody may have written. A damaged or hostile file ends no more than this process:
its memory is limited; of its parent's descriptors it has only the standard streams, the socket and the ring
of blocked processes; it runs as an unprivileged user with those of its parent's capabilities that are for
reading; and a filter of system calls lets it open files for reading and do little else.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path

from lockd import logs
from lockd.errors import LockdError
from lockd.kernel.rings import Ring
from lockd.names.blocked_processes import BlockedProcesses
from lockd.names.kernel.locks import KernelNames
from lockd.names.kernel.sites import is_interrupt
from lockd.names.locks.owners import UserOwners
from lockd.names.locks.user_locks import UserNames, UserStack
from lockd.names.protocol import (
    MOST_FUNCTIONS,
    NOT_READ,
    Answer,
    GoWaits,
    GoWaitsAnswer,
    HolderAnswer,
    KernelLock,
    KernelLockReleased,
    LockAnswer,
    LockReleased,
    NamerSettings,
    OwnedLock,
    Owners,
    OwnersAnswer,
    Question,
    Reload,
    StackAnswer,
    ThreadCaptured,
    UserLockSeen,
    Watch,
    decode_question,
    encode_answer,
)
from lockd.names.shares import Bench, Shares
from lockd.process import confinement, memory, privileges

log = logging.getLogger(__name__)
process_log = logging.getLogger(f"{__name__}.processes")
"""The log of errors in files and memory of processes. Any process can cause such errors, again and again."""
process_log.addFilter(logs.RateLimit())

READING = {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG"}
"""The capabilities that the namer keeps, as far as its parent has them."""
MEMORY_BYTES = 512 << 20
"""The limit of the process's own memory, not counting files that it maps."""
MESSAGE_BYTES = 1 << 17
"""The size of the largest question in bytes."""
IDLE_MS = 30_000
"""Milliseconds without a question or a blocked process, after which the namer ends its child processes. To
start a child process takes as much time as to find two hundred names."""
MEMORY_EXIT = 4
"""The exit code of a namer that has no memory left."""
ASKED_SECONDS = 10.0
"""Seconds for which a process is remembered after one of its threads blocked. A process that the sampler
asked to remember (Watch) is kept longer."""


class Names:
    """Answers every kind of question."""

    def __init__(
        self,
        procfs: Path,
        shares: Shares,
        clock: Callable[[], float] = time.monotonic,
        parked: Sequence[str] = (),
    ) -> None:
        """`procfs` is the root of a proc file system, `clock` returns seconds. `parked`: see UserNames."""
        self._shares, self._clock = shares, clock
        self._user = UserNames(procfs, parked=parked)
        self._kernel = KernelNames(procfs)
        self._owners = UserOwners(procfs)
        self._watched: set[int] = set()
        """Processes that the sampler asked to remember."""
        self._blocked: dict[int, float] = {}
        """By process, the time when one of its threads last blocked."""
        self._forget_at = 0.0

    def note_blocked(self, tgids: Sequence[int]) -> None:
        """Remember processes in which a thread has just blocked: they may soon end."""
        now = self._clock()
        for tgid in tgids:
            self._blocked[tgid] = now
            try:
                self._read_mappings(tgid)
            except MemoryError:
                raise
            except Exception:  # one strange process must not end the naming of all others
                process_log.exception("the mappings of process %d", tgid)
        if tgids and now >= self._forget_at:
            self._forget_at = now + ASKED_SECONDS
            self._forget(now)

    def answer(self, question: Question) -> Answer | None:
        """The answer to a question; None if the question wants none."""
        match question:
            case UserLockSeen():
                with self._shares.turn(question.tgid) as is_allowed:
                    return self._user_lock(question) if is_allowed else question.fallback()
            case KernelLock():
                return self._kernel.answer(question)
            case Owners():
                return OwnersAnswer(question.token, tuple(map(self._owner, question.locks)))
            case GoWaits():
                return GoWaitsAnswer(question.tgids, tuple(map(self._go_waited_ns, question.tgids)))
            case LockReleased():
                with self._shares.turn(question.tgid) as is_allowed:
                    if not is_allowed:
                        return question.fallback()
                    named = self._user.name_holder(question.tgid, question.capture, question.python)
                    return HolderAnswer(question.token, *named)
            case KernelLockReleased():
                return HolderAnswer(question.token, *self._kernel.name_holder(question.stack))
            case ThreadCaptured():
                return self._stack(question)
            case Watch():
                self._watched = self._watched - set(question.gone) | set(question.tgids)
                self._forget(self._clock(), set(question.gone) & set(question.tgids))
                for tgid in question.tgids:
                    self._read_mappings(tgid)
            case Reload():
                logs.set_level(question.log_level)
                self._shares.share = question.share
                self._shares.hold(question.held)
        return None

    def _read_mappings(self, tgid: int) -> None:
        with self._shares.turn(tgid) as is_allowed:
            if is_allowed:
                self._user.read_mappings(tgid)

    def _user_lock(self, question: UserLockSeen) -> LockAnswer:
        arguments = question.tgid, question.tid, question.address, question.guess
        if question.sleeper:
            lock = self._user.name_lock_of_sleeper(*arguments, question.sleeper)
        else:
            lock = self._user.name_lock(*arguments, question.capture)
        return LockAnswer(question.key, True, **vars(lock))

    def _stack(self, question: ThreadCaptured) -> StackAnswer:
        """The functions of a thread's stack.

        The functions of the kernel are named even if the process has used up its share, as its files are not
        read for them.
        """
        user = self._user_stack(question)
        # Without a kernel stack the kernel's symbols are not read. With one, all of its functions are named,
        # as the function by which an interrupt entered the kernel is one of the outermost.
        depth = len(question.kernel)
        names = self._kernel.symbols().describe(question.kernel, depth) if depth else ()
        kernel = question.kernel[depth - len(names) :]  # without nameless and tracing functions on top
        return StackAnswer(
            question.token,
            user.functions[:MOST_FUNCTIONS],
            tuple(address for address, _ in user.frames),
            names[:MOST_FUNCTIONS],
            tuple(address for address, name in zip(kernel, names, strict=True) if is_interrupt(name)),
            user.cpython,
        )

    def _user_stack(self, question: ThreadCaptured) -> UserStack:
        if question.capture:
            with self._shares.turn(question.tgid) as is_allowed:
                if is_allowed:
                    return self._user.stack(question.tgid, question.capture, MOST_FUNCTIONS, question.python)
        return UserStack([])

    def _owner(self, lock: OwnedLock) -> int:
        with self._shares.turn(lock.tgid) as is_allowed:
            return self._owners.owner(**vars(lock)) if is_allowed else NOT_READ

    def _go_waited_ns(self, tgid: int) -> int:
        with self._shares.turn(tgid) as is_allowed:
            return self._user.go_waited_ns(tgid) if is_allowed else -1

    def end_children(self) -> None:
        """End the child processes. To be called while no question waits.

        On kernels without /proc/PID/task/TID/children, only the end of a child shows its CPU time.
        """
        self._user.end_children()

    def _forget(self, now: float, used_again: Set[int] = frozenset()) -> None:
        """Forget all processes but those that the sampler asked to remember, or may soon ask about.

        `used_again` are ids of new processes that belonged to ended ones before. They are forgotten as well,
        because what is known is about the ended processes.
        """
        self._blocked = {tgid: since for tgid, since in self._blocked.items() if since > now - ASKED_SECONDS}
        wanted = (self._watched | self._blocked.keys()) - used_again
        self._user.keep(wanted)
        self._owners.keep(wanted)
        self._shares.keep(wanted)


def serve(sock: socket.socket, names: Names, blocked: BlockedProcesses | None = None) -> None:
    """Answer questions from a socket until the sampler closes its end.

    Before each question the processes that blocked are read from their ring: they may end at any moment.
    Raises MemoryError without an answer if there is no memory left, because each further question could fail
    in the same way. The sampler then starts another namer, and charges the process whose turn it was.
    """
    ready = select.poll()
    for source in (sock, blocked):
        if source:
            ready.register(source, select.POLLIN)
    while True:
        events = ready.poll(IDLE_MS)
        if not events:
            names.end_children()
            events = ready.poll()
        if blocked:
            names.note_blocked(blocked.read())
        if sock.fileno() not in (fd for fd, _ in events):
            continue
        message = sock.recv(MESSAGE_BYTES)
        if not message:
            return
        question = decode_question(message)
        try:
            answer = names.answer(question)
        except MemoryError:
            raise
        except Exception:  # one strange process must not end the naming of all others
            process_log.exception("%s", question.description)
            answer = None if isinstance(question, Watch | Reload) else question.fallback()
        if answer:
            sock.send(encode_answer(answer))


def open_blocked_processes(ring: Ring) -> BlockedProcesses | None:
    """The reader of a ring of blocked processes; None if the kernel refuses to map the ring."""
    try:
        return BlockedProcesses(ring)
    except OSError as error:
        log.warning(
            "the ring buffer of blocked processes cannot be read: %s;"
            " locks of processes that end at once stay without names", error.strerror
        )  # fmt: skip
        return None


def main() -> int:
    """Run the namer until the sampler ends or closes its end of the socket. Returns the exit code."""
    parent = os.getppid()
    with open(int(sys.argv[1]), "rb") as file:
        settings = NamerSettings.from_json(file.read())
    sock = socket.socket(fileno=settings.socket)
    logs.setup(settings.log_level, process="namer")
    try:
        privileges.keep_only(READING & privileges.capabilities(), privileges.unprivileged_user("lockd-namer"))
        privileges.die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before die_with_parent() could take effect
            return 0
        memory.return_freed_memory()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        confinement.confine(confinement.NAMER, log_is_journal=logs.open_journal())
    except LockdError as error:
        log.error("%s", error)
        return error.exit_code
    procfs, ring = Path(settings.procfs), settings.ring
    shares = Shares(procfs, settings.share, Bench(settings.bench), settings.owing)
    shares.hold(settings.held)
    os.close(settings.bench)
    names = Names(procfs, shares, parked=settings.parked)
    try:
        serve(sock, names, open_blocked_processes(Ring(*ring)) if ring else None)
    except ConnectionError:  # the sampler closed its end without reading every answer
        return 0
    except MemoryError:
        log.error("the namer has no memory left; rule: at most %d MiB, see RLIMIT_DATA", MEMORY_BYTES >> 20)
        return MEMORY_EXIT
    return 0
