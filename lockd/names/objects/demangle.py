"""Names of C++ and Rust functions as their authors wrote them, by the library that c++filt is made of."""

from __future__ import annotations

import ctypes
import gc
import glob
import logging
import os
import re
import resource
import signal
import stat
from collections import OrderedDict
from collections.abc import Callable
from typing import NoReturn

from lockd.printable import masked
from lockd.process import confinement, privileges

log = logging.getLogger(__name__)

LIBRARIES = "/usr/lib/*/libbfd-*-system.so"
"""Where Debian has it; its name has a version in it."""
ANSI, VERBOSE = 2, 8
"""DMGL_ANSI and DMGL_VERBOSE of binutils: what c++filt asks for without parameters (-p)."""
SECONDS = 0.5
"""For one name. Some take forever, by intention or not."""
NAMES_OF_CHILD = 1000
"""Then it is ended and another started: what a child took is known once it has ended."""
CPU_SECONDS = 5
"""Of a child, which takes some hundredths of a second for that many names."""
MEMORY = 256 << 20
"""That a child may come to have besides what it begins with."""
MAX_MANGLED = 2048
MAX_ANSWER = 1 << 16
MAX_NAME = 120
CACHED = 20_000

_CLONES = re.compile(r"\.(?:isra|constprop|part|cold|lto_priv|llvm|localalias|abi0|abiinternal)\b.*")
"""Compilers add these; they say nothing to a reader."""
_RUST_HASH = re.compile(r"::h[0-9a-f]{16}$")
_CRATE_HASH = re.compile(r"\[[0-9a-f]+\]")
_MANGLED = re.compile(r"^_{1,3}[ZR][A-Za-z0-9_.$]+\Z")
"""Not with a newline behind it: that would be answered as two names."""


class Demangler:
    """Names without parameters. Without binutils the C++ runtime's own function serves, for C++ alone.

    Symbols are what anybody may have written: they are read in a child that can do nothing but compute. It
    ends itself when a name takes too long, as this process may not be allowed to end any.
    """

    def __init__(self, libraries: str = LIBRARIES) -> None:
        self._library = next(filter(_is_of_root, sorted(glob.glob(libraries), reverse=True)), "")
        if not self._library:
            log.warning("%s, of root alone, is not installed: Rust symbols stay as they are", libraries)
        self._child: _Child | None = None
        self._known: OrderedDict[str, str] = OrderedDict()

    def name(self, symbol: str) -> str:
        """At most 120 characters, all printable; the symbol itself if it is not mangled or cannot be read."""
        known = self._known.get(symbol)
        if known is None:
            name = _RUST_HASH.sub("", self._demangled(_CLONES.sub("", symbol)))
            name = _CRATE_HASH.sub("", name) if symbol.startswith("_R") else name
            known = self._known[symbol] = shortened(name)
            if len(self._known) > CACHED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(symbol)
        return known

    def close(self) -> None:
        """End the child; the next name starts another."""
        if self._child:
            self._child.close()
            self._child = None

    def _demangled(self, symbol: str) -> str:
        if len(symbol) > MAX_MANGLED or not _MANGLED.match(symbol):
            return symbol
        try:
            if self._child and self._child.asked == NAMES_OF_CHILD:
                self.close()
            if not self._child:
                self._child = _Child(self._library)
            name = self._child.ask(symbol.encode()).decode("utf-8", "backslashreplace")
        except OSError as error:
            log.debug("%.200s is not demangled: %s", symbol, error)
            self.close()
            return symbol
        return (name if self._library else _without_parameters(name)) or symbol


class _Child:
    """A process that demangles. It has of this one what fork() leaves it, and no descriptor."""

    def __init__(self, library: str) -> None:
        self.asked = 0
        theirs, self._questions = os.pipe()
        self._answers, to_us = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self._questions)
            os.close(self._answers)
            raise
        else:
            if not self.pid:
                _serve(library, theirs, to_us)
        finally:
            os.close(theirs)
            os.close(to_us)

    def ask(self, symbol: bytes) -> bytes:
        """Empty if it is no name. OSError if that took too long."""
        self.asked += 1
        os.write(self._questions, symbol)
        answer = b""
        while not answer.endswith(b"\n"):
            part = os.read(self._answers, MAX_ANSWER)
            if not part or len(answer) > MAX_ANSWER:
                raise OSError("it took too long, or more memory than there is for it")
            answer += part
        return answer[:-1]

    def close(self) -> None:
        """And wait for its end, which comes when it has nobody left to tell, or has worked for too long."""
        os.close(self._questions)
        os.close(self._answers)
        os.waitpid(self.pid, 0)


def _serve(library: str, questions: int, answers: int) -> NoReturn:
    try:
        gc.disable()  # it would write to all memory, which is this process's own then
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        # Of one that is busy with a name when its parent is killed, nobody else would notice.
        privileges.die_with_parent(signal.SIGKILL)
        privileges.drop_all()
        os.dup2(questions, 0)
        os.dup2(answers, 1)
        os.closerange(2, os.sysconf("SC_OPEN_MAX"))
        demangled = _by_binutils(library) if library else _by_runtime()
        _limit()
        confinement.confine(confinement.COMPUTING)
        while symbol := os.read(0, MAX_MANGLED):
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            answer = demangled(symbol)
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.write(1, (answer if len(answer) < MAX_ANSWER else b"") + b"\n")
    finally:
        os._exit(0)


def _limit() -> None:
    with open("/proc/self/statm", "rb") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    for limit, most in (
        (resource.RLIMIT_AS, size + MEMORY),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))


def _by_binutils(path: str) -> Callable[[bytes], bytes]:
    function = ctypes.CDLL(path).bfd_demangle
    function.restype = ctypes.c_void_p
    return lambda symbol: _taken(function(None, symbol, ANSI | VERBOSE))


def _by_runtime() -> Callable[[bytes], bytes]:
    """With parameters, as it knows no other way."""
    try:
        function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except OSError:
        return lambda symbol: b""
    function.restype = ctypes.c_void_p
    return lambda symbol: _taken(function(symbol, None, None, None))


def _taken(text: int | None) -> bytes:
    """A string that is to be freed."""
    if not text:
        return b""
    copy = ctypes.string_at(text)
    ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return copy


def _is_of_root(program: str) -> bool:
    try:
        about = os.stat(program)
    except OSError:
        return False
    return about.st_uid == 0 and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def shortened(name: str) -> str:
    """Without what is in templates' brackets, where the name is too long, and then cut."""
    if len(name) > MAX_NAME:
        kept, depth = [], 0
        for part in re.split(r"(operator(?:<=>|<<=?|<=?|>>=?|>=?|->\*?)|->|[<>])", name):
            depth -= part == ">" and depth > 0
            if not depth:
                kept.append("<...>" if part == "<" else "" if part == ">" else part)
            depth += part == "<"
        name = "".join(kept)
    if len(name) > MAX_NAME:
        name = name[: MAX_NAME - 3] + "..."
    return masked(name)


def _without_parameters(name: str) -> str:
    """Up to the last bracket that opens outside of all others."""
    depth, end = 0, len(name)
    for at in range(len(name) - 1, -1, -1):
        depth += (name[at] in ")>") - (name[at] in "(<")
        if not depth and name[at] == "(":
            end = at
            break
    return name[:end]
