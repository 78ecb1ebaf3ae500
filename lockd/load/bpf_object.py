"""A compiled translation unit in the kernel: its maps, its programs and their attachments."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Iterable, Sequence

from lockd.errors import HostError, LockdError, refusal
from lockd.kernel.calls import BPF_BTF_LOAD, BPF_MAP_CREATE, BtfLoad, MapCreate, bpf, describe
from lockd.kernel.libbpf import libbpf
from lockd.kernel.manifest import MapInfo
from lockd.load import programs
from lockd.load.compiled import Compiled, MapDefinition, with_addresses, with_kernel_functions, with_maps
from lockd.load.hooks import Candidate
from lockd.load.host import Host
from lockd.load.source import Source

AT_MAP = "AT_"
"""The prefix of the macros for addresses: AT_CONTROL stands for the address of the only element of the map
`control`."""
Attachment = tuple[int, int]
"""The descriptor of a program, and the descriptor that keeps the program attached."""


class BpfObject:
    """The maps of a translation unit, and the programs that have been loaded from it.

    All descriptors stay open until close(), or until the process ends. All methods that load or attach,
    but for load_in_background(), raise HostError with the kernel's reason, or LockdError if the error may be
    temporary.
    """

    def __init__(self, compiled: Compiled, source: Source, host: Host) -> None:
        self._host = host
        self._maps = {definition.name: definition for definition in compiled.maps}
        descriptors = create_maps(compiled.maps, compiled.btf)
        self._map_fds = dict(zip(self._maps, descriptors, strict=True))
        addresses = {
            number >> 32: self._map_fds[name.removeprefix(AT_MAP).lower()]
            for name, number in source.constants.items()
            if name.startswith(AT_MAP)
        }
        self._code: dict[str, bytes] = {}
        for name, compiled_code in compiled.functions.items():
            code = with_addresses(with_maps(compiled_code, dict(enumerate(descriptors))), addresses)
            self._code[name] = with_kernel_functions(code, source.constants["KERNEL_FUNCTION"])
        self._given_base = source.constants["GIVEN_BASE"]
        self._given_enums = [source.enums.get(name, ()) for name in ("lock_type", "success")]
        self._programs: dict[tuple[str, ...], int] = {}
        """Descriptors of programs. A key has the name of the function and what else the program was made for:
        given values, a mechanism or a hook (see _load())."""
        self._attachments: list[int] = []

    def has_map(self, name: str) -> bool:
        return name in self._maps

    def map_fd(self, name: str) -> int:
        return self._map_fds[name]

    def map_info(self, name: str) -> MapInfo:
        definition = self._maps[name]
        return MapInfo(name, definition.entries, definition.key, definition.value)

    def set_number(self, name: str, value: int) -> None:
        """Write the only element of the map `name`, an array of 64-bit numbers. Raises LockdError."""
        self._set_element(name, 0, ctypes.c_uint64(value))

    def set_member(self, name: str, member: str, value: int) -> None:
        """Write a 64-bit member of the only element of the map `name`, an array of structs.

        All other members become 0.

        Raises LockdError.
        """
        definition = self._maps[name]
        assert isinstance(definition.value, dict)
        at = definition.value["offsets"][definition.value["names"].index(member)]
        element = (ctypes.c_ubyte * definition.value_size)()
        ctypes.c_uint64.from_buffer(element, at).value = value
        self._set_element(name, 0, element)

    def set_map(self, outer: str, index: int, inner: str) -> None:
        """Put the map `inner` into element `index` of the array of maps `outer`. Raises LockdError."""
        self._set_element(outer, index, ctypes.c_uint32(self._map_fds[inner]))

    def close(self) -> None:
        """Detach and free everything."""
        for fd in (*self._attachments, *self._programs.values(), *self._map_fds.values()):
            os.close(fd)

    def load_in_background(self, candidates: Iterable[Candidate]) -> threading.Thread:
        """Load the functions of candidates in a thread, which the caller joins before it attaches anything.

        The verifier needs much CPU time for a large program. Meanwhile the caller can call set_map(), which
        mostly waits in the kernel. A function that the kernel refuses is left to attach(), which tries it
        again and raises.
        """

        def load() -> None:
            for candidate in candidates:
                with contextlib.suppress(LockdError):
                    self._load(candidate)

        thread = threading.Thread(target=load)
        thread.start()
        return thread

    def attach(self, candidate: Candidate) -> Attachment:
        """Load the candidate's function and attach it to its hook."""
        program = self._load(candidate)
        attachment = programs.attach(
            program, candidate.mechanism, candidate.hook, self._host.tracefs, candidate.pid, candidate.file
        )
        self._attachments.append(attachment)
        return program, attachment

    def attach_many(self, candidates: Iterable[Candidate]) -> list[tuple[Sequence[Candidate], Attachment]]:
        """Attach candidates by few links: if possible, by one for all that differ in the hook alone.

        This saves time. The kernel removes all attachments of a link together. To remove each of them by
        itself, it would wait every time, some 50 ms, until no processor can be using the attachment any more.

        Only candidates that are `one_of_many` are attached, and only if this kernel has such links. Returns
        each link with its candidates. Candidates in no link are left to attach(): those that the kernel
        refuses, and those with which no other candidate can share a link.
        """
        groups: dict[tuple[object, ...], list[Candidate]] = {}
        for candidate in candidates:
            if candidate.one_of_many and candidate.mechanism in programs.MULTI:
                same = candidate.function, candidate.given, candidate.mechanism, candidate.pid, candidate.file
                groups.setdefault(same, []).append(candidate)
        links: list[tuple[Sequence[Candidate], Attachment]] = []
        for group in groups.values():
            if len(group) > 1 and programs.can_attach_many(group[0].mechanism):
                links += self._attach_group(group)
        return links

    def load_on_demand(self, function: str) -> int:
        """Load a function that is attached to nothing; return its descriptor. It must not be loaded yet."""
        program = programs.load(self._code[function], function, "raw_tracepoint")
        self._programs[function,] = program
        return program

    def run_for_tasks(self, function: str) -> None:
        """Run a function once for every thread of the host, by an iterator over tasks."""
        btf_id = self._host.types.function("bpf_iter_task")
        if not btf_id:
            raise HostError(f"{function}: this kernel does not iterate over tasks")
        program = programs.load(self._code[function], function, "iterator", btf_id)
        try:
            programs.run_iterator(program)
        finally:
            os.close(program)

    def code_for(self, candidate: Candidate, arguments: int = 0) -> bytes:
        """Return the code of the candidate's function, with the values that programs.Given fills in.

        `arguments` is the number of arguments of the hooked function.
        """
        constants = [
            members.index(name) for members, name in zip(self._given_enums, candidate.given, strict=False)
        ]
        if candidate.mechanism == "kprobe":
            constants += [0] * (len(self._given_enums) - len(constants))
            constants += divmod(self._host.return_trampoline, 1 << 32)
        given = programs.Given(self._given_base, arguments, tuple(constants))
        return given.apply_to(self._code[candidate.function])

    def _set_element(
        self, name: str, index: int, value: ctypes.c_uint32 | ctypes.c_uint64 | ctypes.Array[ctypes.c_ubyte]
    ) -> None:
        key = ctypes.c_uint32(index)
        fd = self._map_fds[name]
        if libbpf().bpf_map_update_elem(fd, ctypes.byref(key), ctypes.byref(value), 0):
            raise _refusal(f"map {name}: setting element {index}", ctypes.get_errno())

    def _attach_group(self, group: Sequence[Candidate]) -> list[tuple[Sequence[Candidate], Attachment]]:
        """Attach candidates that differ in the hook alone.

        The kernel refuses a whole link if it refuses one hook of it. That hook is then found by bisection.
        """
        if len(group) < 2:
            return []
        first = group[0]
        hooks = [candidate.hook for candidate in group]
        try:
            program = self._load(first, programs.MULTI[first.mechanism])
            link = programs.attach_many(program, first.mechanism, hooks, first.pid, first.file)
        except HostError:
            middle = len(group) // 2
            return self._attach_group(group[:middle]) + self._attach_group(group[middle:])
        self._attachments.append(link)
        return [(group, (program, link))]

    def _load(self, candidate: Candidate, mechanism: str = "") -> int:
        """Load the candidate's function unless it is loaded; return its descriptor.

        The trampolines of fentry and fexit need a separate program for every hooked function. Other
        mechanisms need one for every combination of given values.
        """
        name, mechanism = candidate.function, mechanism or candidate.mechanism
        btf_id, arguments, key = 0, 0, (name, *candidate.given)
        if mechanism in programs.MULTI.values():
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


def create_maps(maps: Sequence[MapDefinition], btf: bytes) -> list[int]:
    """Create maps and return their descriptors in order.

    `btf` has the types of keys and values; it may be empty. Raises HostError with the kernel's reason,
    LockdError if the error may be temporary; no map is left then.
    """
    types = _load_btf(btf)
    fds: dict[str, int] = {}
    try:
        for definition in sorted(maps, key=lambda definition: bool(definition.inner)):
            fds[definition.name] = _create_map(definition, fds.get(definition.inner, 0), types)
    except LockdError:
        for fd in fds.values():
            os.close(fd)
        raise
    finally:
        if types:
            os.close(types)
    return [fds[definition.name] for definition in maps]


def _create_map(definition: MapDefinition, inner: int, types: int) -> int:
    attr = MapCreate(
        map_type=definition.type,
        key_size=definition.key_size,
        value_size=definition.value_size,
        max_entries=definition.entries,
        map_flags=definition.flags,
        inner_map_fd=inner,
        map_name=definition.name.encode()[:15],
    )
    if types and definition.key_type:
        attr.btf_fd = types
        attr.btf_key_type_id, attr.btf_value_type_id = definition.key_type, definition.value_type
    fd = bpf(BPF_MAP_CREATE, attr)
    if fd < 0:
        number = ctypes.get_errno()
        why = " with `maps` of this size (a service has MemoryMax=)" if number == errno.ENOMEM else ""
        raise _refusal(f"map {definition.name}: cannot be made{why}", number)
    return fd


def _load_btf(btf: bytes) -> int:
    """Load type information; return its descriptor, or 0 if there is none or the kernel refuses it.

    The types are not needed: they let bpftool show the content of maps.
    """
    content = ctypes.create_string_buffer(btf, len(btf))
    attr = BtfLoad(btf=ctypes.addressof(content), btf_size=len(btf))
    return max(bpf(BPF_BTF_LOAD, attr), 0) if btf else 0


def _refusal(message: str, number: int) -> LockdError:
    return refusal(f"{message}: {describe(number)}", number)
