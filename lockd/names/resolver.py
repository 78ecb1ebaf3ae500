"""Names of locks, found in a thread of its own: reading maps and symbols takes too long for the loop."""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from lockd.names.kallsyms import KernelSymbols
from lockd.names.user_locks import name_of_user_lock

log = logging.getLogger(__name__)

MMAP_LOCK = "mmap_lock"
MODULES_SECONDS = 0.1
"""Between two looks at which modules are loaded: there may be thousands of requests at a time."""
QUEUED = 10_000
"""Requests that may wait; further ones are put off until their lock is waited for again."""


@dataclass(frozen=True)
class Request:
    """A lock to be named: in user space by process and address, in the kernel by stack as well."""

    tgid: int
    """0: a kernel lock."""
    address: int
    stack: tuple[int, ...] = ()
    """Return addresses, innermost first."""
    is_mmap_lock: bool = False


@dataclass(frozen=True)
class Answer:
    """The name of the lock that was asked for under `key`."""

    key: int
    lock: str
    site: str
    stack: tuple[str, ...]


class Resolver:
    """Ask with ask(), fetch what is ready with answers(); neither ever waits.

    `procfs` is the root of a proc file system.
    """

    def __init__(self, procfs: Path = Path("/proc")) -> None:
        self._procfs = procfs
        self._requests: queue.Queue[tuple[int, Request]] = queue.Queue(QUEUED)
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._symbols: KernelSymbols | None = None
        self._modules: set[tuple[str, str]] | None = None
        self._check_modules_at = 0.0
        threading.Thread(target=self._run, name="lockd-names", daemon=True).start()

    def ask(self, key: int, request: Request) -> bool:
        """False if too much is being asked for already."""
        try:
            self._requests.put_nowait((key, request))
        except queue.Full:
            return False
        return True

    def answers(self) -> list[Answer]:
        ready: list[Answer] = []
        while not self._answers.empty():
            ready.append(self._answers.get())
        return ready

    def _run(self) -> None:
        while True:
            key, request = self._requests.get()
            try:
                self._answers.put(self._resolve(key, request))
            except Exception:  # one strange process must not end the naming of all others
                log.exception("naming the lock %#x of process %d", request.address, request.tgid)

    def _resolve(self, key: int, request: Request) -> Answer:
        if request.tgid:
            return Answer(key, name_of_user_lock(self._procfs, request.tgid, request.address), "", ())
        symbols = self._kernel_symbols()
        site = symbols.site(request.stack)
        static = symbols.variable(request.address)
        lock = static or (MMAP_LOCK if request.is_mmap_lock else site)
        return Answer(key, lock or "anon", site or "unknown", symbols.describe(request.stack))

    def _kernel_symbols(self) -> KernelSymbols:
        """Read anew if modules have come or gone: their symbols lie between those of others."""
        if self._symbols is None or time.monotonic() >= self._check_modules_at:
            modules = self._loaded_modules()
            if self._symbols is None or modules != self._modules:
                self._modules = modules
                self._symbols = KernelSymbols(self._procfs / "kallsyms")
            self._check_modules_at = time.monotonic() + MODULES_SECONDS
        return self._symbols

    def _loaded_modules(self) -> set[tuple[str, str]]:
        """Names and addresses."""
        try:
            lines = (self._procfs / "modules").read_text().splitlines()
        except FileNotFoundError:  # a kernel without modules
            return set()
        return {(fields[0], fields[5]) for line in lines if len(fields := line.split()) > 5}
