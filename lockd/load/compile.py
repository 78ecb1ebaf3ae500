"""The one door to bcc: compile, attach, and take hold of the descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any

from lockd.errors import HostError, LockdError
from lockd.load.host import Candidate
from lockd.load.source import HEADERS, Source
from lockd.manifest import Layout, MapInfo


class Module:
    """A compiled translation unit. Descriptors stay open until the process ends."""

    def __init__(self, source: Source) -> None:
        os.environ["BCC_KERNEL_SOURCE"] = str(HEADERS)
        try:
            from bcc import BPF  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise HostError(
                f"bcc: cannot be imported by {sys.executable}: {error}; install the package "
                "python3-bpfcc, and run lockd with the system's own python3"
            ) from error
        self._types = {"tracepoint": BPF.TRACEPOINT, "raw_tracepoint": BPF.RAW_TRACEPOINT}
        with _native_stderr() as printed:
            try:
                self._bpf: Any = BPF(text=source.text)
            except Exception as error:
                raise LockdError(f"the BPF programs do not compile: {error}\n{printed()}") from error
        self.functions: dict[str, int] = {}
        """Descriptor of every function loaded."""

    def map_fd(self, name: str) -> int:
        return int(self._bpf[name].map_fd)

    def map_info(self, name: str) -> MapInfo:
        table = self._bpf[name]
        return MapInfo(name, int(table.max_entries), layout_of(table.Key), layout_of(table.Leaf))

    def put_map(self, outer: str, index: int, inner: str) -> None:
        """Let slot `index` of an array of maps be the map `inner`."""
        self._bpf[outer][ctypes.c_int(index)] = ctypes.c_int(self.map_fd(inner))

    def load(self, candidate: Candidate) -> None:
        """Load one function into the kernel. Raises HostError with the verifier's last words."""
        if candidate.function in self.functions:
            return
        with _native_stderr() as printed:
            try:
                loaded = self._bpf.load_func(candidate.function.encode(), self._types[candidate.mechanism])
            except Exception as error:
                words = "\n".join(printed().splitlines()[-12:])
                raise HostError(f"{candidate.function}: the kernel refuses it: {error}\n{words}") from error
        self.functions[candidate.function] = int(loaded.fd)

    def attach(self, candidate: Candidate) -> int:
        """Load and attach; the descriptor that keeps it attached. Raises HostError."""
        self.load(candidate)
        with _native_stderr() as printed:
            try:
                if candidate.mechanism == "raw_tracepoint":
                    self._bpf.attach_raw_tracepoint(tp=candidate.hook, fn_name=candidate.function)
                    return int(self._bpf.raw_tracepoint_fds[candidate.hook.encode()])
                self._bpf.attach_tracepoint(tp=candidate.hook, fn_name=candidate.function)
                return int(self._bpf.tracepoint_fds[candidate.hook.encode()])
            except Exception as error:
                raise HostError(f"{candidate.hook}: cannot be attached: {error} {printed()}") from error


def layout_of(ctype: Any) -> Layout | str:
    """A ctypes type, as bcc derives it from the C declaration, in numpy's words."""
    if issubclass(ctype, ctypes.Array):
        if ctype._type_ is ctypes.c_char:
            return f"S{ctype._length_}"
        return f"({ctype._length_},){layout_of(ctype._type_)}"
    if not issubclass(ctype, ctypes.Structure):
        size = ctypes.sizeof(ctype)
        return f"{'i' if _is_signed(ctype) else 'u'}{size}"
    fields = [field[0] for field in ctype._fields_]
    return {
        "names": fields,
        "formats": [layout_of(field[1]) for field in ctype._fields_],
        "offsets": [getattr(ctype, name).offset for name in fields],
        "itemsize": ctypes.sizeof(ctype),
    }


def _is_signed(ctype: Any) -> bool:
    return bool(ctype(-1).value == -1)


@contextlib.contextmanager
def _native_stderr() -> Iterator[Any]:
    """Catch what clang and the verifier print to descriptor 2, to show it only with an error."""
    saved = os.dup(2)
    with os.fdopen(os.memfd_create("stderr"), "w+b") as caught:
        os.dup2(caught.fileno(), 2)

        def printed() -> str:
            caught.seek(0)
            return caught.read().decode(errors="replace")

        try:
            yield printed
        finally:
            os.dup2(saved, 2)
            os.close(saved)
