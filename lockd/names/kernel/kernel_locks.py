"""Names of the kernel's locks: symbols of static ones, well-known members, else who asks for them."""

from __future__ import annotations

import time
from pathlib import Path

from lockd.names.kernel.kallsyms import KernelSymbols
from lockd.names.kernel.kernel_members import MMAP_LOCK, member_of
from lockd.names.protocol import ANON, UNKNOWN, KernelLock, LockAnswer

MODULES_SECONDS = 0.1
"""Between two looks at which modules are loaded: there may be thousands of requests at a time."""


class KernelNames:
    """`procfs` is the root of a proc file system."""

    def __init__(self, procfs: Path = Path("/proc")) -> None:
        self._procfs = procfs
        self._symbols: KernelSymbols | None = None
        self._modules: set[tuple[str, str]] | None = None
        self._check_modules_at = 0.0

    def answer(self, asked: KernelLock) -> LockAnswer:
        symbols = self.symbols()
        site = symbols.site(asked.stack)
        lock = symbols.variable(asked.address) or (MMAP_LOCK if asked.is_mmap_lock else "")
        for function in symbols.callers(asked.stack)[:1]:
            lock = lock or member_of(asked.lock_type, function) or site
        return LockAnswer(asked.key, False, lock or ANON, site or UNKNOWN, symbols.describe(asked.stack))

    def symbols(self) -> KernelSymbols:
        """Read anew if modules have come or gone: their symbols lie between those of others."""
        if self._symbols is None or time.monotonic() >= self._check_modules_at:
            modules = self._loaded_modules()
            if self._symbols is None or modules != self._modules:
                self._modules = modules
                self._symbols = KernelSymbols(self._procfs / "kallsyms", self._procfs / "modules")
            self._check_modules_at = time.monotonic() + MODULES_SECONDS
        return self._symbols

    def _loaded_modules(self) -> set[tuple[str, str]]:
        """Names and addresses."""
        try:
            lines = (self._procfs / "modules").read_text().splitlines()
        except FileNotFoundError:  # a kernel without modules
            return set()
        return {(fields[0], fields[5]) for line in lines if len(fields := line.split()) > 5}
