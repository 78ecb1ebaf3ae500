"""What the namer remembers of processes that blocked, and for how long."""

from __future__ import annotations

import shutil
from pathlib import Path

from lockd.names.__main__ import ASKED_SECONDS, Names
from lockd.names.messages import LockAnswer, Looks, UserLockSeen

FIRST, SECOND = 100, 200
MAPS = "400000-401000 r-xp 00000000 08:01 7 /bin/waiter\n401000-402000 rw-p 00001000 08:01 7 /bin/waiter\n"
LOCK = 0x401100


class Host:
    """Names of processes of a procfs of its own, at times of its own."""

    def __init__(self, procfs: Path) -> None:
        self._procfs = procfs
        self._now = 1000.0
        self.names = Names(procfs, lambda: self._now)

    def blocks_and_ends(self, tgid: int) -> None:
        directory = self._procfs / str(tgid)
        directory.mkdir()
        (directory / "maps").write_text(MAPS)
        self.names.look_at_blocked([tgid])
        shutil.rmtree(directory)

    def wait(self, seconds: float) -> None:
        self._now += seconds

    def lock_of(self, tgid: int) -> str:
        answer = self.names.answer(UserLockSeen(1, tgid, tgid, LOCK, "lock"))
        assert isinstance(answer, LockAnswer)
        return answer.lock


def test_a_process_that_ended_is_still_known(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    assert host.lock_of(FIRST) == "waiter+0x1100"


def test_it_is_known_while_others_are_spoken_of(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    host.names.answer(Looks((SECOND,), (300,)))
    host.wait(ASKED_SECONDS / 2)
    host.blocks_and_ends(SECOND)
    assert host.lock_of(FIRST) == "waiter+0x1100"


def test_it_is_forgotten_if_nobody_asks(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    host.wait(ASKED_SECONDS)
    host.blocks_and_ends(SECOND)
    assert host.lock_of(FIRST) == "anon"


def test_what_the_sampler_speaks_of_is_known_until_it_says_otherwise(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    host.names.answer(Looks((FIRST,), ()))
    host.wait(ASKED_SECONDS)
    host.blocks_and_ends(SECOND)
    assert host.lock_of(FIRST) == "waiter+0x1100"
    host.names.answer(Looks((), (FIRST,)))
    assert host.lock_of(FIRST) == "anon"
