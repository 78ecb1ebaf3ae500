"""A compiled translation unit in the kernel: its maps, and its functions as they are attached."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from lockd.errors import HostError
from lockd.kernel.manifest import MapInfo
from lockd.load import maps, programs
from lockd.load.attach import MULTI, attach, attach_together, run_iterator
from lockd.load.compiled import Compiled, with_maps
from lockd.load.hooks import Candidate
from lockd.load.host import Host
from lockd.load.source import Source


class Module:
    """Descriptors stay open until close(), or until the process ends. Raises LockdError."""

    def __init__(self, compiled: Compiled, source: Source, host: Host) -> None:
        self._host = host
        self._maps = {one.name: one for one in compiled.maps}
        descriptors = maps.create(compiled.maps, compiled.btf)
        self._map_fds = dict(zip(self._maps, descriptors, strict=True))
        self._code = {
            name: with_maps(code, dict(enumerate(descriptors))) for name, code in compiled.functions.items()
        }
        self._given_base = source.constants["GIVEN_BASE"]
        self._meanings = [
            (source.enums.get("lock_type", ()), "LOCK_"),
            (source.enums.get("success", ()), "SUCCESS_"),
        ]
        self._programs: dict[tuple[str, ...], int] = {}
        """By function and what it was given."""
        self._attached: list[int] = []

    def has_map(self, name: str) -> bool:
        return name in self._maps

    def map_fd(self, name: str) -> int:
        return self._map_fds[name]

    def map_info(self, name: str) -> MapInfo:
        one = self._maps[name]
        return MapInfo(name, one.entries, one.key, one.value)

    def set(self, name: str, value: int) -> None:
        """The only element of an array of 64-bit numbers."""
        maps.set_element(self._map_fds[name], name, 0, ctypes.c_uint64(value))

    def put_map(self, outer: str, index: int, inner: str) -> None:
        """Let slot `index` of an array of maps be the map `inner`."""
        maps.set_element(self._map_fds[outer], outer, index, ctypes.c_uint32(self._map_fds[inner]))

    def close(self) -> None:
        """Detach everything."""
        for fd in (*self._attached, *self._programs.values(), *self._map_fds.values()):
            os.close(fd)

    def attach(self, candidate: Candidate) -> tuple[int, int]:
        """Load and attach; descriptors of the program and of what keeps it attached. Raises LockdError."""
        program = self._load(candidate)
        attachment = attach(program, candidate.mechanism, candidate.hook, self._host.tracefs, candidate.pid)
        self._attached.append(attachment)
        return program, self._attached[-1]

    def attach_together(self, candidates: Sequence[Candidate]) -> tuple[int, int]:
        """The same of several that differ in the hook alone, by one link: all or none."""
        first = candidates[0]
        program = self._load(first, MULTI[first.mechanism])
        hooks = [candidate.hook for candidate in candidates]
        self._attached.append(attach_together(program, first.mechanism, hooks, first.pid))
        return program, self._attached[-1]

    def load_on_demand(self, function: str) -> int:
        """Load a function that is attached nowhere; its descriptor. Raises LockdError."""
        if (function,) not in self._programs:
            self._programs[function,] = programs.load(self._code[function], function, "raw_tracepoint")
        return self._programs[function,]

    def run_for_tasks(self, function: str) -> None:
        """Have a function called once for every task of the host. Raises LockdError."""
        btf_id = self._host.types.function("bpf_iter_task")  # 5.8
        if not btf_id:
            raise HostError(f"{function}: this kernel does not iterate over tasks")
        program = programs.load(self._code[function], function, "iterator", btf_id)
        try:
            run_iterator(program)
        finally:
            os.close(program)

    def code_for(self, candidate: Candidate, arguments: int = 0) -> bytes:
        """The code of its function with what it is given; `arguments` of the hooked function."""
        constants = [
            members.index(prefix + word.upper())
            for (members, prefix), word in zip(self._meanings, candidate.given, strict=False)
        ]
        if candidate.mechanism == "kprobe":
            constants += [0] * (len(self._meanings) - len(constants))
            constants += divmod(self._host.return_trampoline, 1 << 32)
        given = programs.Given(self._given_base, arguments, tuple(constants))
        return given.put_into(self._code[candidate.function])

    def _load(self, candidate: Candidate, mechanism: str = "") -> int:
        """A trampoline has a program of its own for every function; all else for every thing given."""
        name, mechanism = candidate.function, mechanism or candidate.mechanism
        btf_id, arguments, key = 0, 0, (name, *candidate.given)
        if mechanism in MULTI.values():
            key = (*key, mechanism)
        if mechanism in ("fentry", "fexit"):
            btf_id = self._host.types.function(candidate.hook) or 0
            if not btf_id:
                raise HostError(f"{candidate.hook}: the kernel's BTF does not describe it")
            arguments, key = self._host.types.arguments(btf_id), (name, candidate.hook)
        if key not in self._programs:
            code = self.code_for(candidate, arguments)
            self._programs[key] = programs.load(code, name, mechanism, btf_id)
        return self._programs[key]
