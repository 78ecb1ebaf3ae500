"""The one door to bcc: compile, attach, and take hold of the descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any

from lockd.errors import HostError, LockdError
from lockd.load import attach
from lockd.load.btf import KernelTypes
from lockd.load.hooks import Candidate
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
        self._given_base = source.constants["GIVEN_BASE"]
        self._meanings = [
            (source.enums.get("lock_type", ()), "LOCK_"),
            (source.enums.get("success", ()), "SUCCESS_"),
        ]
        self._probes: dict[tuple[str, ...], int] = {}
        """Programs that bcc did not load, by function and what it was given."""
        self._attached: list[int] = []

    def map_fd(self, name: str) -> int:
        return int(self._bpf[name].map_fd)

    def map_info(self, name: str) -> MapInfo:
        table = self._bpf[name]
        return MapInfo(name, int(table.max_entries), layout_of(table.Key), layout_of(table.Leaf))

    def set(self, name: str, value: int) -> None:
        """The only element of an array of 64-bit numbers."""
        self._bpf[name][ctypes.c_int(0)] = ctypes.c_uint64(value)

    def put_map(self, outer: str, index: int, inner: str) -> None:
        """Let slot `index` of an array of maps be the map `inner`."""
        self._bpf[outer][ctypes.c_int(index)] = ctypes.c_int(self.map_fd(inner))

    def close(self) -> None:
        """Detach everything."""
        for fd in (*self._attached, *self._probes.values()):
            os.close(fd)
        self._bpf.cleanup()

    def attach(self, candidate: Candidate, types: KernelTypes) -> tuple[int, int]:
        """Load and attach; descriptors of the program and of what keeps it attached. Raises HostError."""
        if candidate.mechanism in attach.ATTACH_TYPES:
            return self._attach_probe(candidate, types)
        program = self._load(candidate)
        with _native_stderr() as printed:
            try:
                if candidate.mechanism == "raw_tracepoint":
                    self._bpf.attach_raw_tracepoint(tp=candidate.hook, fn_name=candidate.function)
                    return program, int(self._bpf.raw_tracepoint_fds[candidate.hook.encode()])
                self._bpf.attach_tracepoint(tp=candidate.hook, fn_name=candidate.function)
                return program, int(self._bpf.tracepoint_fds[candidate.hook.encode()])
            except Exception as error:
                raise HostError(f"{candidate.hook}: cannot be attached: {error} {printed()}") from error

    def _load(self, candidate: Candidate) -> int:
        """Load a function into the kernel. Raises HostError with the verifier's last words."""
        name = candidate.function
        with _native_stderr() as printed:
            try:
                return int(self._bpf.load_func(name.encode(), self._types[candidate.mechanism]).fd)
            except Exception as error:
                words = "\n".join(printed().splitlines()[-12:])
                raise HostError(f"{name}: the kernel refuses it: {error}\n{words}") from error

    def _attach_probe(self, candidate: Candidate, types: KernelTypes) -> tuple[int, int]:
        """A trampoline has a program of its own for every function; a kprobe for every thing given."""
        name, mechanism = candidate.function, candidate.mechanism
        btf_id, arguments, key = 0, 0, (name, *candidate.given)
        if mechanism in ("fentry", "fexit"):
            btf_id = types.function(candidate.hook) or 0
            if not btf_id:
                raise HostError(f"{candidate.hook}: the kernel's BTF does not describe it")
            arguments, key = types.arguments(btf_id), (name, candidate.hook)
        if key not in self._probes:
            constants = (
                members.index(prefix + word.upper())
                for (members, prefix), word in zip(self._meanings, candidate.given, strict=False)
            )
            given = attach.Given(self._given_base, arguments, tuple(constants))
            code = given.put_into(self._bpf.dump_func(name.encode()))
            self._probes[key] = attach.load(code, name, mechanism, btf_id)
        program = self._probes[key]
        if btf_id:
            self._attached.append(attach.attach_tracing(program, candidate.hook))
        else:
            self._attached.append(attach.attach_kprobe(program, candidate.hook, mechanism))
        return program, self._attached[-1]


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
