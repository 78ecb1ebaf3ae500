"""Functions of whole stacks, of processes and of the kernel, for the one-shot tools."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from lockd.names.capture import Capture
from lockd.names.kallsyms import KernelSymbols
from lockd.names.user_locks import UserLock, UserNames

MOST_FRAMES = 128


class StackNames:
    """`procfs` is the root of a proc file system. Of a process that is gone, as it was last looked at."""

    def __init__(self, procfs: Path = Path("/proc")) -> None:
        self._procfs = procfs
        self._user = UserNames(procfs)

    @cached_property
    def _kernel(self) -> KernelSymbols:
        return KernelSymbols(self._procfs / "kallsyms", self._procfs / "modules")

    def look(self, tgids: Iterable[int]) -> None:
        """Remember what these have mapped, for when they are gone."""
        for tgid in tgids:
            self._user.look(tgid)

    def user(self, tgid: int, capture: Capture) -> tuple[str, ...]:
        """Innermost first; what has no name as OBJECT+0xOFFSET."""
        return tuple(frame.function or frame.label for frame in self._user.stack(tgid, capture, MOST_FRAMES))

    def lock(self, tgid: int, tid: int, address: int, guess: str, capture: Capture | None) -> UserLock:
        """What a thread blocked on; see UserNames.name()."""
        return self._user.name(tgid, tid, address, guess, capture)

    def kernel(self, addresses: tuple[int, ...]) -> tuple[str, ...]:
        """Innermost first, without the tracing on top; what has no name as 0xADDRESS."""
        return self._kernel.describe(addresses, MOST_FRAMES)
