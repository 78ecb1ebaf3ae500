"""What of the namer's time each process and each user takes, so that none takes it from all others."""

from __future__ import annotations

import contextlib
import io
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

SAVED_SECONDS = 10.0
"""That a process or a user may take at once, as a large program's symbols may."""
FORGOTTEN_AT = 10_000
"""Processes and users, of whom those are forgotten who owe nothing."""
ROOT, NOBODY = 0, -1
BENCH, REFUSED = struct.Struct("=qq"), struct.Struct("=Q")

Turn = tuple[int, int]
"""A process and its user; NOBODY where that is not known."""


class Bench:
    """Whose turn it is, and how many were refused one: memory that the namer shares with the sampler, who may
    have to end it for that."""

    def __init__(self, fd: int) -> None:
        """By the descriptor of a file with room for a page."""
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._memory.madvise(mmap.MADV_DONTFORK)  # it is no child's turn

    @property
    def turn(self) -> Turn:
        """NOBODY twice while it is nobody's; anything if the namer was not itself any more."""
        tgid, user = BENCH.unpack_from(self._memory)
        return tgid - 1, user - 1

    @turn.setter
    def turn(self, turn: Turn) -> None:
        BENCH.pack_into(self._memory, 0, turn[0] + 1, turn[1] + 1)

    @property
    def refused(self) -> int:
        (refused,) = REFUSED.unpack_from(self._memory, BENCH.size)
        return int(refused)

    @refused.setter
    def refused(self, refused: int) -> None:
        REFUSED.pack_into(self._memory, BENCH.size, refused)


class Shares:
    """Whoever has taken more than `share` of the time, and what was saved of it, has to wait.

    Root's processes have each a share, as whoever is on a host runs as root; those of another user have one
    together as well. `owing`: turns of which each took a namer so long that it was ended.
    """

    def __init__(
        self,
        procfs: Path,
        share: float,
        bench: Bench | None = None,
        owing: Sequence[tuple[Turn, float]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._procfs, self.share, self._bench, self._clock = procfs, share, bench, clock
        self._delay = _Delay()
        self._owed: dict[Turn, tuple[float, float]] = {}
        """By a process, or by a user as (NOBODY, user): seconds, and when that was so."""
        self._warned: set[Turn] = set()
        """Of whom was said, since they last owed nothing, that they have to wait."""
        self._users: dict[int, int] = {}
        for turn, seconds in owing:
            self._take(turn, seconds)

    @contextlib.contextmanager
    def turn(self, tgid: int) -> Iterator[bool]:
        """What is done for a process meanwhile is its own; whether it may be done."""
        turn = tgid, self._user(tgid)
        if max(self._owes(one) for one in _who(turn)) > SAVED_SECONDS:
            if self._bench:
                self._bench.refused += 1
            yield False
            return
        if self._bench:
            self._bench.turn = turn
        began, delayed = self._clock(), self._delay.seconds()
        try:
            yield True
        finally:
            self._take(turn, self._clock() - began - (self._delay.seconds() - delayed))
            if self._bench:
                self._bench.turn = NOBODY, NOBODY

    def _owes(self, one: Turn) -> float:
        seconds, at = self._owed.get(one, (0.0, 0.0))
        return max(seconds - self.share * (self._clock() - at), 0.0)

    def _take(self, turn: Turn, seconds: float) -> None:
        now = self._clock()
        for one in _who(turn):
            before = self._owes(one)
            self._owed[one] = before + max(seconds, 0.0), now
            if not before:
                self._warned.discard(one)
            if self._owed[one][0] > SAVED_SECONDS and one not in self._warned:
                self._warned.add(one)
                log.warning(
                    "%s has taken its share of the namer's time: its new locks have no names for %d s, and"
                    " again whenever it takes more than %d%% of a CPU",
                    f"user {one[1]}" if one[0] == NOBODY else f"process {one[0]}",
                    (self._owed[one][0] - SAVED_SECONDS) / self.share,
                    100 * self.share,
                )  # fmt: skip
        if len(self._owed) > FORGOTTEN_AT:
            self._owed = {one: owed for one, owed in self._owed.items() if self._owes(one)}
            self._warned &= self._owed.keys()

    def _user(self, tgid: int) -> int:
        """Of a process that is gone, the user that it had."""
        with contextlib.suppress(OSError):
            self._users[tgid] = os.stat(self._procfs / str(tgid)).st_uid
        return self._users.get(tgid, NOBODY)

    def keep(self, alive: set[int]) -> None:
        """Forget whose all other processes were."""
        for tgid in self._users.keys() - alive:
            del self._users[tgid]


def _who(turn: Turn) -> tuple[Turn, ...]:
    tgid, user = turn
    process, together = (tgid, NOBODY), (NOBODY, user)
    return (process,) if user in (ROOT, NOBODY) else (process, together)


class _Delay:
    """How long this process has waited for a CPU, of which others are the cause."""

    def __init__(self) -> None:
        self._file: io.FileIO | None = None
        with contextlib.suppress(OSError):  # a kernel without CONFIG_SCHED_INFO
            self._file = io.FileIO("/proc/self/schedstat")

    def seconds(self) -> float:
        return int(os.pread(self._file.fileno(), 100, 0).split()[1]) / 1e9 if self._file else 0.0
