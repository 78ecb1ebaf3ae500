"""The kernel test module: scripts that it runs and the truth it tells (see tests/vm/module/README.md)."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

MODULE = Path(__file__).parents[1] / "vm/module/build" / f"{platform.release()}.ko"
"""The module for the running kernel. tests/vm puts those for the kernels that it boots there."""
FILE = Path("/proc/lockd_test")
LOCK_TYPES = ("mutex", "rwsem_read", "rwsem_write", "semaphore")


@dataclass(frozen=True)
class Script:
    """A script for the module: the steps of each role (`ROLE` or `ROLE*THREADS`) as one string."""

    roles: Mapping[str, str]
    rounds: int = 1
    lingers: bool = False
    """Whether the threads live on, and so keep their name, until LockModule.end_threads()."""

    def text(self, comm: str) -> str:
        """Return the text that the module reads. Its threads are called `comm` (15 bytes at most)."""
        lines = [f"{role}: {steps}" for role, steps in self.roles.items()]
        return "\n".join([f"{comm} {self.rounds}{' linger' if self.lingers else ''}", *lines]) + "\n"


@dataclass(frozen=True)
class TypeTruth:
    """What happened to the locks of one type, as the module tells it. Times are in ns."""

    acquisitions: int
    failed: int
    holds: int
    hold_ns: int
    max_hold_ns: int
    waits: int
    wait_ns: int
    max_wait_ns: int
    spins: int
    spin_ns: int


@dataclass(frozen=True)
class Turns:
    """How long threads waited while three functions held a lock in turns, in ns."""

    waited_ns: int = 0
    by_holder_ns: Mapping[str, int] = field(default_factory=dict)
    """The time for which threads waited while a function turn_NAME_LOCK held the lock, by NAME."""


@dataclass(frozen=True)
class Truth:
    """The truth that the module tells about a script, by lock type."""

    threads: Mapping[str, TypeTruth] = field(default_factory=dict)
    """The truth about the kernel threads."""
    caller: Mapping[str, TypeTruth] = field(default_factory=dict)
    """The truth about the process that wrote the script."""
    turns: Turns = field(default_factory=Turns)


class LockModule:
    """The loaded module. Its constructor skips the test where there is none for this kernel."""

    def __init__(self) -> None:
        if not FILE.exists():
            if not MODULE.exists():
                pytest.skip(f"host: no test module for kernel {platform.release()}; tests/vm builds them")
            subprocess.run(["insmod", MODULE], check=True)

    def unload(self) -> None:
        subprocess.run(["rmmod", "lockd_test"], check=True)

    def run(self, script: Script, comm: str) -> Truth:
        """Run a script to its end and return the truth about it.

        Raises OSError: EINVAL, EIO (the script gets nowhere), EBUSY (another one runs).
        """
        self.write(script.text(comm))
        return self.truth()

    def end_threads(self) -> None:
        """End the threads of all scripts that linger."""
        self.write("end\n")

    def truth(self) -> Truth:
        """Return the truth about the last script."""
        told = json.loads(FILE.read_text())
        turns = Turns(**told.pop("turns"))
        return Truth(
            turns=turns,
            **{
                whose: {lock_type: TypeTruth(**numbers) for lock_type, numbers in types.items()}
                for whose, types in told.items()
            },
        )

    @staticmethod
    def write(text: str) -> None:
        """Write a script in one piece, as the module wants it."""
        fd = os.open(FILE, os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
