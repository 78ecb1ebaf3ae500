"""What a thread of CPython waits for and where, by the Python functions that it is in.

To C a contended `threading.Lock` and an idle `Queue.get()` are the same. Python functions of the standard
library tell them apart, and so does the type of the object that the lock is in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockd.names.runtimes.cpython import PythonFrame

LOCK, COND = "lock", "cond"

QUEUE_TYPE, RLOCK_TYPE = "_queue.SimpleQueue", "_thread.RLock"
LOCK_TYPES = {"_thread.lock", RLOCK_TYPE, QUEUE_TYPE, "_multiprocessing.SemLock"}
"""Types of objects that have the address of their lock right behind the header."""

_WAITS = {
    "threading": {"wait", "join", "_wait_for_tstate_lock", "_shutdown"},
    "multiprocessing/synchronize": {"wait"},
    "multiprocessing/queues": {"get", "put"},
    "concurrent/futures/thread": {"_worker"},
}
"""Functions that wait for others to do something, if they are the innermost."""
_ENTERS = ("multiprocessing/synchronize", "__enter__")
"""Takes the lock by which one of several idle readers of a queue is the one that reads."""
_TAKES = {
    "logging/__init__": {"acquire", "_acquireLock", "__enter__"},
    "_weakrefset": {"__enter__"},
    "contextlib": {"__enter__", "enter_context"},
}
_LOCKING = re.compile(
    r"threading|queue|_threading_local|concurrent/futures/\w+|multiprocessing/\w+|<frozen importlib\._\w+>"
)
_BOOTSTRAP = "_bootstrap"
"""The outermost function of a thread or of a child process; beyond it is what its parent was in."""
_STARTS = {"_bootstrap", "_bootstrap_inner", "run"}

_LIBRARY = re.compile(r"(?:.*/)?python3(?:\.\d+t?|\d+\.zip)/(?!(?:site|dist)-packages/)(.+)\.py")
_PACKAGE = re.compile(r".*/(?:site|dist)-packages/(.+)")
MOST_LABEL = 250
"""Characters. The names of all functions of a stack have to fit into one message."""
_NOT_TELLING = {"__init__.py", "__main__.py"}


@dataclass(frozen=True)
class PythonWait:
    """`site` is `file:function`, the file as it is called on every host; empty without frames.

    `kind` is empty if neither the frames nor the type of the object are known that would tell it.
    """

    kind: str
    site: str


def judge_python(frames: Sequence[PythonFrame], waited_for: str = "") -> PythonWait:
    """By the frames of a waiting thread, innermost first, and the type of the object, if that is known."""
    return PythonWait(_kind(frames, waited_for), _site(frames))


def label(frame: PythonFrame) -> str:
    """`app.py:Registry.put`; files of packages from where the package is, others without their directory."""
    text = f"{_shown_file(frame.file)}:{frame.function}"
    return text if len(text) <= MOST_LABEL else f"...{text[3 - MOST_LABEL :]}"


def _shown_file(file: str) -> str:
    for pattern in (_LIBRARY, _PACKAGE):
        if found := pattern.fullmatch(file):
            return f"{found[1]}.py" if pattern is _LIBRARY else found[1]
    parts = file.rsplit("/", 2)
    return "/".join(parts[-2 if parts[-1] in _NOT_TELLING else -1 :])


def _kind(frames: Sequence[PythonFrame], waited_for: str) -> str:
    if waited_for == QUEUE_TYPE:
        return COND
    if waited_for == RLOCK_TYPE:  # also as a Condition takes it back
        return LOCK
    if not frames:
        return ""
    places = [_place(frame) for frame in frames[:2]]
    if places[0] == _ENTERS:
        del places[0]
    return COND if places and places[0][1] in _WAITS.get(places[0][0], ()) else LOCK


def _site(frames: Sequence[PythonFrame]) -> str:
    """The innermost function outside locking code; else the outermost that is not in every thread."""
    inside = []
    for frame in frames:
        module, function = _place(frame)
        is_locking = _LOCKING.fullmatch(module) is not None
        if not is_locking and function not in _TAKES.get(module, ()):
            return label(frame)
        if not is_locking or function not in _STARTS:
            inside.append(frame)
        if is_locking and function == _BOOTSTRAP:
            break
    return label(inside[-1]) if inside else ""


def _place(frame: PythonFrame) -> tuple[str, str]:
    """The module, as a path, of the standard library, empty for any other; and the bare function."""
    library = _LIBRARY.fullmatch(frame.file)
    module = library[1] if library else frame.file if frame.file.startswith("<frozen ") else ""
    return module, frame.function.rpartition(".")[2]
