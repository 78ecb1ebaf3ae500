"""Names of C++ and Rust functions as their authors wrote them, by binutils' c++filt."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import resource
import select
import signal
import stat
import subprocess
import time
from collections import OrderedDict

from lockd import privileges

log = logging.getLogger(__name__)

COMMAND = ("/usr/bin/c++filt", "-p")
"""Not what is found by PATH, which may name a directory of somebody else's."""
SECONDS = 0.5
"""For one name. Some take forever, by intention or not."""
NAMES_OF_CHILD = 1000
"""Then it is ended and another started: what a child took is known once it has ended."""
CPU_SECONDS = 5
"""Of a child, which takes some hundredths of a second for that many names."""
MEMORY = 256 << 20
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
    """Names without parameters. Without c++filt the C++ runtime's own function serves, for C++ alone."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._is_missing = not _is_of_root(command[0])
        if self._is_missing:
            log.warning("%s, of root alone, is not installed: Rust symbols stay as they are", command[0])
        self._child: subprocess.Popen[bytes] | None = None
        self._asked = 0
        """Names that the child was asked for."""
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
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _demangled(self, symbol: str) -> str:
        if len(symbol) > MAX_MANGLED or not _MANGLED.match(symbol):
            return symbol
        if not self._is_missing:
            try:
                return self._ask(symbol)
            except OSError as error:
                log.debug("%s did not demangle %.200s: %s", self._command[0], symbol, error)
                self.close()
                return symbol
        return _by_runtime(symbol)

    def _ask(self, symbol: str) -> str:
        if self._asked == NAMES_OF_CHILD:
            self.close()
        if self._child is None:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                preexec_fn=_limit_child,  # noqa: PLW1509  # the namer has one thread
            )
            self._asked = 0
        self._asked += 1
        assert self._child.stdin and self._child.stdout
        self._child.stdin.write(symbol.encode() + b"\n")
        answer, until = b"", time.monotonic() + SECONDS
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._child.stdout], [], [], max(0, until - time.monotonic()))
            part = os.read(self._child.stdout.fileno(), MAX_ANSWER) if ready else b""
            answer += part
            if not part or len(answer) > MAX_ANSWER:
                raise OSError("it ended, or took too long")
        return answer[:-1].decode("utf-8", "backslashreplace")


def _is_of_root(program: str) -> bool:
    try:
        about = os.stat(program)
    except OSError:
        return False
    return about.st_uid == 0 and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _limit_child() -> None:
    """Of one that is busy with a name when its parent is killed, nobody else would notice."""
    privileges.die_with_parent(signal.SIGKILL)
    for limit, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))


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
    return name if name.isprintable() else "".join(c if c.isprintable() else "?" for c in name)


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    return library


def _by_runtime(symbol: str) -> str:
    library = _runtime()
    status = ctypes.c_int()
    text = library.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status)) if library else None
    if not text:
        return symbol
    try:
        name = ctypes.string_at(text).decode("utf-8", "backslashreplace")
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return _without_parameters(name)


def _without_parameters(name: str) -> str:
    """Up to the last bracket that opens outside of all others."""
    depth, end = 0, len(name)
    for at in range(len(name) - 1, -1, -1):
        depth += (name[at] in ")>") - (name[at] in "(<")
        if not depth and name[at] == "(":
            end = at
            break
    return name[:end]
