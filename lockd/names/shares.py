"""Shares of the namer's time, so that one process or one user cannot take all of it."""

from __future__ import annotations

import contextlib
import io
import logging
import mmap
import os
import pwd
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

SAVED_SECONDS = 10.0
"""Seconds of the namer's time that a process or a user may take beyond its share, as for the symbols of a
large program."""
ANSWER_SECONDS = 30.0
"""Seconds without an answer after which a namer counts as hung, and is ended. An emulated machine needs 10 s
for the first answer."""
FORGOTTEN_AT = 10_000
"""If there are more accounts of processes and users than this, accounts without a debt are forgotten."""
ROOT, NOBODY = 0, -1
FIRST_USER, LAST_USER = 1000, (1 << 32) - 2
"""The lowest and the highest id of a user that may be a person. Users below UID_MIN of login.defs(5) are
services."""
SUBORDINATE_IDS = Path("/etc/subuid")
BENCH, REFUSED = struct.Struct("=qq"), struct.Struct("=Q")

Turn = tuple[int, int]
"""A process that the namer works for, and the id of the user that it belongs to; NOBODY if unknown."""


class Bench:
    """Memory shared by namer and sampler: for which process the namer works, and how many turns it refused.

    When the namer hangs and the sampler has to end it, the sampler reads here which process was the cause.
    """

    def __init__(self, fd: int) -> None:
        """`fd` is the descriptor of a file of at least one page."""
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._memory.madvise(mmap.MADV_DONTFORK)  # no child of the namer may write to this memory

    @property
    def turn(self) -> Turn:
        """The process that the namer works for, and its user; (NOBODY, NOBODY) if there is none. A namer that
        an attacker controls may write any numbers."""
        tgid, user = BENCH.unpack_from(self._memory)
        return tgid - 1, user - 1

    @turn.setter
    def turn(self, turn: Turn) -> None:
        BENCH.pack_into(self._memory, 0, turn[0] + 1, turn[1] + 1)

    @property
    def refused(self) -> int:
        """The number of turns that were refused so far."""
        (refused,) = REFUSED.unpack_from(self._memory, BENCH.size)
        return int(refused)

    @refused.setter
    def refused(self, refused: int) -> None:
        REFUSED.pack_into(self._memory, BENCH.size, refused)


class SubordinateIds:
    """The ranges of user ids that a file like /etc/subuid gives to users (subuid(5)).

    A person with such a range, for example for rootless containers, can start processes with any id of it.
    Ranges of root and of services are left out: a service such as a container engine gives each id of its
    range to whom it likes. The file is read again when it has changed. Lines that make no sense are skipped,
    as newuidmap(1) skips them.
    """

    def __init__(self, path: Path = SUBORDINATE_IDS) -> None:
        self._path = path
        self._version: tuple[int, int, int] | None = None
        """What stat() said of the file that was read last: inode, size and time of change in nanoseconds."""
        self._ranges: list[tuple[range, str]] = []
        """Each range, and the name or the id of the user that it belongs to."""
        self._owners: dict[str, int] = {}
        """The ids of those owners of ranges that were looked up, by name or id; NOBODY if it is no person."""

    def person(self, user: int) -> int:
        """The id of the person whose range has the id `user`; `user` itself if it is in no person's range."""
        self._read_changed()
        name = next((name for ids, name in self._ranges if user in ids), None)
        if name is None:
            return user
        if name not in self._owners:  # looked up when it is needed, as there may be thousands of users
            self._owners[name] = _person(name)
        owner = self._owners[name]
        return user if owner == NOBODY else owner

    def _read_changed(self) -> None:
        """Read the file if it has changed. While it cannot be read, what was read last stays."""
        with contextlib.suppress(OSError):
            status = os.stat(self._path)
            version = status.st_ino, status.st_size, status.st_mtime_ns
            if version != self._version:
                self._ranges = list(_ranges(self._path.read_text(errors="replace")))
                self._owners, self._version = {}, version


def _ranges(text: str) -> Iterator[tuple[range, str]]:
    """The ranges that the lines NAME:FIRST:COUNT give to users. NAME is a user's name or id."""
    for line in text.splitlines():
        name, _, ids = line.partition(":")
        first, _, count = ids.partition(":")
        with contextlib.suppress(ValueError):  # a line in error
            yield range(int(first), int(first) + int(count)), name


def _person(name: str) -> int:
    """The id of a user who is a person, by the user's name or id; NOBODY for other users, and if unknown.

    The namer has no sockets, so that it finds users in files, and not those that only a directory service
    knows.
    """
    try:
        user = int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except (ValueError, KeyError):
        return NOBODY
    return user if FIRST_USER <= user <= LAST_USER else NOBODY


class Shares:
    """Grants turns to processes. A turn is the namer's work for one process.

    Each process has an account, to which the seconds of its turns are charged as a debt. All processes of one
    user also have an account in common, unless the user is unknown or root: most of a host's processes run as
    root. An id in a person's range of `subordinate_ids` counts as that person. In each second a debt falls by
    `share` seconds. While it is above SAVED_SECONDS, turns are refused. `owing` are turns that made an
    earlier namer end, and the seconds that each still owes. `clock` returns seconds.
    """

    def __init__(
        self,
        procfs: Path,
        share: float,
        bench: Bench | None = None,
        owing: Sequence[tuple[Turn, float]] = (),
        clock: Callable[[], float] = time.monotonic,
        subordinate_ids: SubordinateIds | None = None,
    ) -> None:
        self._procfs, self.share, self._bench, self._clock = procfs, share, bench, clock
        self._subordinate_ids = subordinate_ids or SubordinateIds()
        self._delay = _Delay()
        self._owed: dict[Turn, tuple[float, float]] = {}
        """The seconds that each account owed, and when. Keys are (process, NOBODY) and (NOBODY, user)."""
        self._warned: set[Turn] = set()
        """Accounts for which a warning was logged since they last owed nothing."""
        self._users: dict[int, int] = {}
        self._held: frozenset[Turn] = frozenset()
        for turn, seconds in owing:
            self._charge(turn, seconds)

    @contextlib.contextmanager
    def turn(self, tgid: int) -> Iterator[bool]:
        """Charge a process for the time of a `with` block. Yields whether the process may have its turn now.

        A turn lasts no longer than ANSWER_SECONDS unless the namer is frozen, as by `systemctl freeze`. The
        rest of a longer turn is not charged.

        A turn that ends by MemoryError stays in the Bench: the namer is about to end because of it.
        """
        turn = tgid, self._user(tgid)
        is_held = not self._held.isdisjoint(_accounts(turn))
        if is_held or max(self._debt(account) for account in _accounts(turn)) > SAVED_SECONDS:
            if self._bench:
                self._bench.refused += 1
            yield False
            return
        if self._bench:
            self._bench.turn = turn
        began, delayed = self._clock(), self._delay.seconds()
        is_lost = False
        try:
            yield True
        except MemoryError:
            is_lost = True
            raise
        finally:
            seconds = self._clock() - began - (self._delay.seconds() - delayed)
            self._charge(turn, min(seconds, ANSWER_SECONDS))
            if self._bench and not is_lost:
                self._bench.turn = NOBODY, NOBODY

    def hold(self, turns: Iterable[Turn]) -> None:
        """Refuse these processes and, unless they are root's, all processes of their users.

        A killed namer hangs in each of these turns, in a read of memory that no signal ends. The debt of the
        turn is paid off with time, even while the namer hangs. Without this refusal the same user could then
        make the next namer hang. Each call replaces the turns of the call before.
        """
        self._held = frozenset(account for turn in turns for account in _accounts(turn))

    def _debt(self, account: Turn) -> float:
        """Seconds that an account owes now."""
        seconds, since = self._owed.get(account, (0.0, 0.0))
        return max(seconds - self.share * (self._clock() - since), 0.0)

    def _charge(self, turn: Turn, seconds: float) -> None:
        now = self._clock()
        for account in _accounts(turn):
            before = self._debt(account)
            owed = before + max(seconds, 0.0)
            self._owed[account] = owed, now
            if not before:
                self._warned.discard(account)
            if owed > SAVED_SECONDS and account not in self._warned:
                self._warned.add(account)
                tgid, user = account
                log.warning(
                    "%s has taken its share of the namer's time: its new locks have no names for %d s, and"
                    " again whenever it takes more than %d%% of a CPU",
                    f"user {user}" if tgid == NOBODY else f"process {tgid}",
                    (owed - SAVED_SECONDS) / self.share,
                    100 * self.share,
                )  # fmt: skip
        if len(self._owed) > FORGOTTEN_AT:
            self._owed = {account: owed for account, owed in self._owed.items() if self._debt(account)}
            self._warned &= self._owed.keys()

    def _user(self, tgid: int) -> int:
        """The id of the user that a process belongs to, or last belonged to before it ended; NOBODY if
        unknown."""
        with contextlib.suppress(OSError):
            user = os.stat(self._procfs / str(tgid)).st_uid
            self._users[tgid] = user and self._subordinate_ids.person(user)
        return self._users.get(tgid, NOBODY)

    def keep(self, alive: set[int]) -> None:
        """Forget the users of all processes but those in `alive`."""
        for tgid in self._users.keys() - alive:
            del self._users[tgid]


def _accounts(turn: Turn) -> tuple[Turn, ...]:
    """The accounts that a turn is charged to."""
    tgid, user = turn
    process, all_of_user = (tgid, NOBODY), (NOBODY, user)
    return (process,) if user in (ROOT, NOBODY) else (process, all_of_user)


class _Delay:
    """The time that this process has waited for a CPU. It is not charged: other processes are the cause."""

    def __init__(self) -> None:
        self._file: io.FileIO | None = None
        with contextlib.suppress(OSError):  # a kernel without CONFIG_SCHED_INFO
            self._file = io.FileIO("/proc/self/schedstat")

    def seconds(self) -> float:
        """Seconds that this process has waited so far; 0 if the kernel does not count them."""
        return int(os.pread(self._file.fileno(), 100, 0).split()[1]) / 1e9 if self._file else 0.0
