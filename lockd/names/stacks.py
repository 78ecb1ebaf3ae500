"""Functions of whole stacks, of processes and of the kernel, for the one-shot tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lockd.names.kernel.kallsyms import KernelSymbols
from lockd.names.kernel.kernel_locks import KernelNames
from lockd.names.kernel.kernel_sites import is_interrupt, is_locking, is_tracing
from lockd.names.locks.locking import Frame
from lockd.names.locks.user_locks import UserLock, UserNames
from lockd.names.protocol import KernelLock
from lockd.names.unwind.capture import Capture

MOST_FRAMES = 128
UNKNOWN = "[unknown]"
"""A frame of a process that was gone before anybody looked, or of code that nobody describes."""


@dataclass(frozen=True)
class Shown:
    """What of a frame is told besides its function: where in it (`+0x1f`, and of which object or module),
    and its address before that. Of a caller both say where it goes on, as debuggers do."""

    offsets: bool = False
    addresses: bool = False


FUNCTIONS = Shown()


class StackNames:
    """`procfs` is the root of a proc file system. Of a process that is gone, as it was last looked at."""

    def __init__(self, procfs: Path = Path("/proc"), shown: Shown = FUNCTIONS) -> None:
        self._shown = shown
        self._user = UserNames(procfs)
        self._kernel_names = KernelNames(procfs)

    @property
    def _kernel(self) -> KernelSymbols:
        return self._kernel_names.symbols()

    def interrupts(self) -> tuple[int, int]:
        """Address and size of the functions that interrupts enter the kernel by; 0 if not together."""
        return self._kernel.neighbours("asm_common_interrupt", is_interrupt)

    def look(self, tgids: Iterable[int]) -> None:
        """Remember what these have mapped, for when they are gone."""
        for tgid in tgids:
            self._user.look(tgid)

    def load(self, tgids: Iterable[int]) -> None:
        """The same, and read the files they run; it takes some 10 ms for each file that is new."""
        for tgid in tgids:
            self._user.load(tgid)

    def user(self, tgid: int, capture: Capture) -> tuple[str, ...]:
        """Innermost first; what has no name as OBJECT+0xOFFSET, or UNKNOWN if it is in no object."""
        stack = self._user.stack(tgid, capture, MOST_FRAMES)
        return tuple(
            self._with_address(address, self._user_frame(address, frame)) for address, frame in stack
        )

    def lock(self, tgid: int, tid: int, address: int, guess: str, capture: Capture | None) -> UserLock:
        """What a thread blocked on; see UserNames.name()."""
        return self._user.name(tgid, tid, address, guess, capture)

    def variable(self, tgid: int, address: int) -> str:
        """A variable of a program or library, as OBJECT:NAME; empty if it is none."""
        return self._user.variable(tgid, address)

    def kernel(self, addresses: tuple[int, ...]) -> tuple[str, ...]:
        """Innermost first, without the tracing on top; what has no name as 0xADDRESS."""
        stack = self._kernel.traced(addresses)[:MOST_FRAMES]
        names = (
            map(self._kernel.place, stack)
            if self._shown.offsets
            else self._kernel.describe(stack, MOST_FRAMES)
        )
        return tuple(self._with_address(*one) for one in zip(stack, names, strict=True))

    def kernel_places(self, addresses: tuple[int, ...], without_locking: bool = False) -> tuple[str, ...]:
        """The same as NAME+0xOFFSET, without any tracing. `without_locking`: from the first on that does more
        than to take a lock, if there is one."""
        symbols = self._kernel
        named = [(one, name) for one in addresses if not is_tracing(name := symbols.function(one))]
        callers = (at for at, (_, name) in enumerate(named) if name and not is_locking(name))
        first = next(callers, 0) if without_locking else 0
        return tuple(symbols.place(address).partition(" ")[0] for address, _ in named[first:])

    def kernel_lock(
        self, address: int, lock_type: str, stack: tuple[int, ...], is_mmap_lock: bool = False
    ) -> str:
        """The name of a lock that was taken in `stack`, `anon` if it has none."""
        return self._kernel_names.answer(KernelLock(0, address, lock_type, stack, is_mmap_lock)).lock

    def _user_frame(self, address: int, frame: Frame) -> str:
        if not frame.function or not self._shown.offsets:
            return frame.function or (frame.label if frame.object else UNKNOWN)
        offset = f"+{address - frame.start:#x}" if frame.start else ""
        return f"{frame.function}{offset} [{frame.object}]"

    def _with_address(self, address: int, name: str) -> str:
        return f"{address:016x} {name}" if self._shown.addresses else name
