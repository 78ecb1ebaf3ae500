"""Functions of whole stacks, of processes and of the kernel, as the one-shot tools show them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lockd.names.kernel.kallsyms import KernelSymbols
from lockd.names.kernel.locks import KernelNames
from lockd.names.kernel.sites import is_interrupt, is_locking, is_tracing
from lockd.names.locks.locking_code import Frame
from lockd.names.locks.user_locks import UserLock, UserNames
from lockd.names.protocol import KernelLock
from lockd.names.unwind.capture import Capture

MOST_FRAMES = 128
"""The most functions of a stack that are shown."""


@dataclass(frozen=True)
class FrameFormat:
    """What to show of a frame besides its function.

    The offset and the address of a frame are those of the instruction at which the function will continue, as
    in debuggers.
    """

    offsets: bool = False
    """Whether to show the offset in the function (`+0x1f`), and the object file or module."""
    addresses: bool = False
    """Whether to show the address, in front of the function."""


FUNCTIONS = FrameFormat()
"""The format that shows nothing but functions."""


def interrupt_entries(procfs: Path = Path("/proc")) -> tuple[int, int]:
    """Address and size in bytes of the functions by which interrupts enter the kernel on x86-64.

    These are asm_common_interrupt() and the entry functions right behind it. Both numbers are 0 for a kernel
    without that function, as on arm64. The entry functions of processors with FRED are left out, because
    system calls enter by the same functions. All symbols of the kernel are read, which may take a second.
    """
    try:
        symbols = KernelSymbols(procfs / "kallsyms", procfs / "modules")
    except PermissionError:  # the kernel refuses programs of this user too, and the session then says so
        return 0, 0
    return symbols.neighbours("asm_common_interrupt", is_interrupt)


class StackNames:
    """Names functions, locks and variables for a tool.

    `procfs` is the root of a proc file system. What belongs to a process that is gone is named by the
    mappings that were read before it ended.
    """

    def __init__(self, procfs: Path = Path("/proc"), frame_format: FrameFormat = FUNCTIONS) -> None:
        self._format = frame_format
        self._user_names = UserNames(procfs)
        self._kernel_names = KernelNames(procfs)

    @property
    def _symbols(self) -> KernelSymbols:
        return self._kernel_names.symbols()

    def read_mappings(self, tgids: Iterable[int]) -> None:
        """Remember what these processes have mapped, so that names can be found after they have ended."""
        for tgid in tgids:
            self._user_names.read_mappings(tgid)

    def load_files(self, tgids: Iterable[int]) -> None:
        """Remember what these processes have mapped, and read their object files. A new file takes 10 ms."""
        for tgid in tgids:
            self._user_names.load_files(tgid)

    def user_stack(self, tgid: int, capture: Capture) -> tuple[str, ...]:
        """The functions of a process's captured stack, innermost first, as the FrameFormat says."""
        frames = self._user_names.stack(tgid, capture, MOST_FRAMES).frames
        return tuple(
            self._with_address(address, self._user_frame(address, frame)) for address, frame in frames
        )

    def user_lock(self, tgid: int, tid: int, address: int, guess: str, capture: Capture | None) -> UserLock:
        """The lock for which a thread blocked, see UserNames.name_lock()."""
        return self._user_names.name_lock(tgid, tid, address, guess, capture)

    def variable(self, tgid: int, address: int) -> str:
        """The name of a variable of a program or library, as UserNames.variable() returns it."""
        return self._user_names.variable(tgid, address)

    def kernel_stack(self, addresses: tuple[int, ...]) -> tuple[str, ...]:
        """The kernel's functions of a stack, innermost first, without nameless and tracing ones on top.

        Any other function without a name is shown as 0xADDRESS.
        """
        stack = self._symbols.without_tracing(addresses)[:MOST_FRAMES]
        names = (
            map(self._symbols.place, stack)
            if self._format.offsets
            else self._symbols.describe(stack, MOST_FRAMES)
        )
        return tuple(itertools.starmap(self._with_address, zip(stack, names, strict=True)))

    def kernel_places(self, addresses: tuple[int, ...], without_locking: bool = False) -> tuple[str, ...]:
        """The kernel's functions of a stack as NAME+0xOFFSET, innermost first, without any tracing functions.

        `without_locking` leaves out the locking code on top, unless the stack has nothing else.
        """
        symbols = self._symbols
        named = [(address, symbols.function(address)) for address in addresses]
        named = [(address, name) for address, name in named if not is_tracing(name)]
        callers = (i for i, (_, name) in enumerate(named) if name and not is_locking(name))
        first = next(callers, 0) if without_locking else 0
        return tuple(symbols.place(address).partition(" ")[0] for address, _ in named[first:])

    def kernel_lock(
        self, address: int, lock_type: str, stack: tuple[int, ...], is_mmap_lock: bool = False
    ) -> str:
        """The name of a kernel lock that was taken in `stack`; `anon` if it has none."""
        return self._kernel_names.answer(KernelLock(0, address, lock_type, stack, is_mmap_lock)).lock

    def _user_frame(self, address: int, frame: Frame) -> str:
        if not frame.function or not self._format.offsets:
            return frame.name
        offset = f"+{address - frame.start:#x}" if frame.start else ""
        return f"{frame.function}{offset} [{frame.object}]"

    def _with_address(self, address: int, name: str) -> str:
        return f"{address:016x} {name}" if self._format.addresses else name
