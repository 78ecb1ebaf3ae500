"""Demangled names of C++ and Rust functions, by libbfd: the library of binutils that c++filt uses.

Anybody can write a symbol, and some symbols make the library run for ever or take all memory. Therefore the
library runs in a child process that can do nothing but compute.
"""

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
import sys
from collections import OrderedDict
from typing import NoReturn

from lockd.printable import masked
from lockd.process import confinement, privileges

log = logging.getLogger(__name__)

LIBRARIES = "/usr/lib/*/libbfd-*-system.so"
"""Where Debian's package binutils installs libbfd. The name of the file contains the version."""
ANSI, VERBOSE = 2, 8
"""DMGL_ANSI and DMGL_VERBOSE of binutils: the flags that c++filt sets for names without parameters (-p)."""
SECONDS = 0.5
"""Seconds of CPU time that one symbol may take. Time in which the child waits for a CPU does not count."""
NAMES_OF_CHILD = 1000
"""Symbols after which a new child process replaces the old one. lockd counts the CPU time of its children,
but some kernels tell this time only after the end of the child."""
CPU_SECONDS = 5
"""Seconds of CPU time that a child may take. NAMES_OF_CHILD usual names take some hundredths of a second."""
MEMORY = 256 << 20
"""Bytes of address space that a child may use besides what it starts with."""
MAX_MANGLED = 2048
"""Bytes of the longest symbol that is demangled."""
MAX_ANSWER = 1 << 16
"""Bytes of the longest demangled name that a child returns."""
MAX_NAME = 120
"""Characters of the longest name that Demangler returns."""
CACHED = 20_000
"""Names that are remembered, at most."""
CACHED_BYTES = 16 << 20
"""Bytes of memory that the remembered names and their symbols may take. CACHED usual names take 6 MB."""

_CLONES = re.compile(r"(?:\.(?:isra|constprop|part|cold|lto_priv|llvm|localalias)(?:\.\d+)?){1,8}\Z")
"""Suffixes that compilers of C, C++ and Rust add to symbols. They say nothing to a reader."""
_ABI = re.compile(r"\.abi(?:0|internal)\Z")
"""The suffix that the linker of Go adds to symbols."""
_RUST_HASH = re.compile(r"::h[0-9a-f]{16}$")
_CRATE_HASH = re.compile(r"(?<=\w)\[[0-9a-f]+\]")
"""The hash behind the name of a crate. `[f64]` without a name before it is a slice of numbers."""
_MANGLED = re.compile(r"^_{1,3}[ZR][A-Za-z0-9_.$]+\Z")
"""A mangled name. It must not end in a newline, which the child would answer with two lines."""


class Demangler:
    """Demangles names, without parameters. Without libbfd, symbols stay as they are.

    The child process with the library ends itself when a name takes too long, because its parent may not be
    allowed to end it.
    """

    def __init__(self, libraries: str = LIBRARIES) -> None:
        """`libraries` is a shell pattern for the path of libbfd.

        Of the matching files that only root can write, the last one in the order of names is used.
        """
        matches = sorted(glob.glob(libraries), reverse=True)
        self._library = next(filter(_is_writable_by_root_only, matches), "")
        if not self._library:
            log.warning(
                "no file %s that only root may write: C++ and Rust symbols stay mangled;"
                " rule: install the package binutils",
                libraries,
            )
        self._child: _Child | None = None
        self._known: OrderedDict[str, str] = OrderedDict()
        self._known_bytes = 0

    def name(self, symbol: str, may_be_clone: bool = True) -> str:
        """The demangled name, or the symbol itself if it is not mangled or cannot be demangled.

        The name has at most MAX_NAME characters, all printable, and no suffixes or hashes of the compiler.
        `may_be_clone` is False for a language whose names have dots, such as Java or Go: there `.part` can be
        the name of a function, and is not removed as a suffix of the compiler.
        """
        symbol = _ABI.sub("", symbol)
        symbol = _CLONES.sub("", symbol) if may_be_clone else symbol
        symbol = symbol[: MAX_MANGLED + 1]  # a symbol of this length is not demangled
        known = self._known.get(symbol)
        if known is None:
            name = _RUST_HASH.sub("", self._demangled(symbol))
            name = _CRATE_HASH.sub("", name) if symbol.startswith("_R") else name
            known = self._known[symbol] = shorten_name(name)
            self._known_bytes += _bytes_of(symbol, known)
            while len(self._known) > CACHED or self._known_bytes > CACHED_BYTES:
                self._known_bytes -= _bytes_of(*self._known.popitem(last=False))
        else:
            self._known.move_to_end(symbol)
        return known

    def close(self) -> None:
        """End the child process. The next symbol that has to be demangled starts another."""
        if self._child:
            self._child.close()
            self._child = None

    def _demangled(self, symbol: str) -> str:
        if not self._library or len(symbol) > MAX_MANGLED or not _MANGLED.match(symbol):
            return symbol
        try:
            if self._child and self._child.asked == NAMES_OF_CHILD:
                self.close()
            if not self._child:
                self._child = _Child(self._library)
            name = self._child.demangle(symbol.encode()).decode("utf-8", "backslashreplace")
        except OSError as error:
            log.debug("%.200s is not demangled: %s", symbol, error)
            self.close()
            return symbol
        return name or symbol


class _Child:
    """A child process that demangles. It has a copy of its parent's memory, and only two pipes open."""

    def __init__(self, library: str) -> None:
        self.asked = 0
        """How many symbols the child was asked to demangle."""
        questions, self._questions = os.pipe()
        try:
            self._answers, answers = os.pipe()
        except OSError:
            os.close(questions)
            os.close(self._questions)
            raise
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self._questions)
            os.close(self._answers)
            raise
        else:
            if not self.pid:
                _serve(library, questions, answers)
        finally:
            os.close(questions)
            os.close(answers)

    def demangle(self, symbol: bytes) -> bytes:
        """The demangled name; empty if the symbol is no mangled name. Raises OSError if the child ended."""
        self.asked += 1
        os.write(self._questions, symbol)
        answer = b""
        while not answer.endswith(b"\n"):
            part = os.read(self._answers, MAX_ANSWER)
            if not part or len(answer) > MAX_ANSWER:
                raise OSError("it took more time or memory than a name may take")
            answer += part
        return answer[:-1]

    def close(self) -> None:
        """Close the pipes and wait until the child ends: at once, or when its time for a name is over."""
        os.close(self._questions)
        os.close(self._answers)
        os.waitpid(self.pid, 0)


def _serve(library: str, questions: int, answers: int) -> NoReturn:
    """Run the child process: read one symbol at a time, and answer each with one line."""
    try:
        gc.disable()  # a garbage collection would write to all memory, and so copy the pages of the parent
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        # While the child is busy with a name, it would not notice that its parent was killed.
        privileges.die_with_parent(signal.SIGKILL)
        privileges.drop_all()
        os.dup2(questions, 0)
        os.dup2(answers, 1)
        os.closerange(2, os.sysconf("SC_OPEN_MAX"))
        bfd_demangle = ctypes.CDLL(library).bfd_demangle
        bfd_demangle.restype = ctypes.c_void_p
        _set_limits()
        confinement.confine(confinement.COMPUTING)
        while symbol := os.read(0, MAX_MANGLED):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            answer = _copy_and_free(bfd_demangle(None, symbol, ANSI | VERBOSE))
            signal.setitimer(signal.ITIMER_PROF, 0)
            os.write(1, (answer if len(answer) < MAX_ANSWER else b"") + b"\n")
    finally:
        os._exit(0)


def _set_limits() -> None:
    """Limit the address space, the CPU time and the core dump of this process."""
    with open("/proc/self/statm", "rb") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    privileges.lower_limits(
        {resource.RLIMIT_AS: size + MEMORY, resource.RLIMIT_CPU: CPU_SECONDS, resource.RLIMIT_CORE: 0}
    )


def _copy_and_free(text: int | None) -> bytes:
    """The bytes of the C string at the address `text`, which is then freed; empty for NULL."""
    if not text:
        return b""
    copy = ctypes.string_at(text)
    ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return copy


def _bytes_of(*texts: str) -> int:
    """Bytes of memory that texts take. A character takes one to four bytes."""
    return sum(map(sys.getsizeof, texts))


def _is_writable_by_root_only(path: str) -> bool:
    try:
        about = os.stat(path)
    except OSError:
        return False
    return about.st_uid == 0 and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def shorten_name(name: str) -> str:
    """A name of at most MAX_NAME printable characters.

    If the name is longer, template arguments become `<...>`. What is still too long is cut off. The brackets
    at the beginning of Rust's `<Type as Trait>::f` and `<Type>::f` are no arguments: they stay.
    """
    if len(name) > MAX_NAME:
        own = len(name) - len(name.lstrip("<"))
        kept, depth = ["<" * own], 0
        for part in re.split(r"(operator(?:<=>|<<=?|<=?|>>=?|>=?|->\*?)|->|[<>])", name[own:]):
            if part == ">" and own and not depth:
                kept.append(">")
                own -= 1
                continue
            depth -= part == ">" and depth > 0
            if not depth:
                kept.append("<...>" if part == "<" else "" if part == ">" else part)
            depth += part == "<"
        name = "".join(kept)
    if len(name) > MAX_NAME:
        name = name[: MAX_NAME - 3] + "..."
    return masked(name)
