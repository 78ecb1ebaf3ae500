"""Names of kernel locks that follow from earlier answers of the namer.

Only a static lock has a symbol. The name and the site of any other kernel lock follow from its type and from
the stack in which a thread waits for it. Threads wait for such locks at ever new addresses, but in few
stacks. Ever new processes wait for the same static locks. Therefore only a few waits need a question to the
namer.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockd.names.protocol import KernelLock, LockAnswer

REMEMBERED_SECONDS = 600.0
"""Seconds after which a name is to be asked for anew: modules of the kernel may have come and gone."""
AGAIN_SECONDS = 60.0
"""Seconds after which an old name is asked for once more, if no answer has come since."""
MOST_REMEMBERED = 2000
"""The largest number of remembered answers, each with a stack of some 2 KB. The oldest are dropped."""

_Wait = tuple[str, tuple[int, ...], bool]
"""What a name follows from: the lock's type, the stack, and whether the lock is the waiter's mmap_lock."""


@dataclass
class _Known:
    """An answer, and how long it may be used."""

    answer: LockAnswer
    due: float
    """The time on the monotonic clock in seconds, from which the namer is to be asked anew."""


class KnownKernelLocks:
    """The namer's answers about kernel locks, each of which is right for other kernel locks as well.

    In all methods, `now` is the time of the monotonic clock in seconds.
    """

    def __init__(self) -> None:
        self._known: dict[_Wait, _Known] = {}

    def find(self, question: KernelLock) -> LockAnswer | None:
        """An earlier answer that is right for the lock of this question as well; None if there is none.

        The answer has the key of the earlier question.
        """
        known = self._known.get(_wait(question))
        if not known:
            return None
        first, last = known.answer.span
        return known.answer if first <= question.address <= last else None

    def is_due(self, question: KernelLock, now: float) -> bool:
        """Whether the answer that find() returns is so old that the namer, if there is one, is asked as well.

        To be called only if find() has returned an answer. After a call that returns True, calls return False
        for AGAIN_SECONDS.
        """
        known = self._known[_wait(question)]
        if now < known.due:
            return False
        known.due = now + AGAIN_SECONDS
        return True

    def remember(self, question: KernelLock, answer: LockAnswer, now: float) -> None:
        """Remember the namer's answer to a question, in place of an earlier one.

        An answer with an empty `span` is not remembered, and the earlier answer is forgotten.
        """
        wait = _wait(question)
        self._known.pop(wait, None)
        if answer.span:
            if len(self._known) == MOST_REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[wait] = _Known(answer, now + REMEMBERED_SECONDS)


def _wait(question: KernelLock) -> _Wait:
    return question.lock_type, question.stack, question.is_mmap_lock
