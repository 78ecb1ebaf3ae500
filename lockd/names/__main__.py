"""The namer process: answers what locks are called and who holds them, one question after another.

`python3 lockd/isolated.py lockd.names SOCKET-FD PROCFS LOG-LEVEL`

It reads files that anybody may have written. What goes wrong there ends at most this process: its memory is
limited, it has no descriptors but the socket, and of its parent's capabilities only those for reading.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from lockd import logs, privileges
from lockd.names.kernel_locks import KernelNames
from lockd.names.messages import (
    Answer,
    KernelLock,
    LockAnswer,
    Looks,
    Owners,
    OwnersAnswer,
    Question,
    UserLockSeen,
    decode_question,
    encode_answer,
)
from lockd.names.owners import owner_of_user_lock
from lockd.names.user_locks import UserNames

log = logging.getLogger(__name__)

READING = {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG"}
MEMORY_BYTES = 512 << 20
"""Of its own, not counting files that it maps."""
NICENESS = 5
MESSAGE_BYTES = 1 << 17


class Names:
    """Everything that can be asked."""

    def __init__(self, procfs: Path) -> None:
        self._procfs = procfs
        self._user = UserNames(procfs)
        self._kernel = KernelNames(procfs)
        self._looked: set[int] = set()

    def answer(self, question: Question) -> Answer | None:
        """None if none is wanted."""
        match question:
            case UserLockSeen():
                known = self._user.name(
                    question.tgid, question.tid, question.address, question.guess, question.capture
                )
                return LockAnswer(
                    question.key, True, known.lock, known.site, known.stack, known.kind, known.family
                )
            case KernelLock():
                return self._kernel.answer(question)
            case Owners():
                tids = (
                    owner_of_user_lock(self._procfs, lock.tgid, lock.address, lock.kind, lock.family)
                    for lock in question.locks
                )
                return OwnersAnswer(question.token, tuple(tids))
            case Looks():
                self._looked = self._looked - set(question.gone) | set(question.tgids)
                self._user.keep(self._looked)
                for tgid in question.tgids:
                    self._user.look(tgid)
        return None


def serve(sock: socket.socket, names: Names) -> None:
    """Until the sampler closes its end."""
    while message := sock.recv(MESSAGE_BYTES):
        question = decode_question(message)
        try:
            answer = names.answer(question)
        except Exception:  # one strange process must not end the naming of all others
            log.exception("%s", question.words)
            answer = question.fallback() if question.wants_answer else None
        if answer:
            sock.send(encode_answer(answer))


def main() -> None:
    parent = os.getppid()
    fd, procfs, level = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    logs.setup(level, process="namer")
    privileges.keep_only(READING & privileges.capabilities())
    privileges.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be noticed
        return
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(socket.socket(fileno=fd), Names(procfs))


if __name__ == "__main__":
    main()
