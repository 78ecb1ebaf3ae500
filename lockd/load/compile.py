"""Compilation by bcc: a source becomes definitions of maps and code of functions.

Only this module imports bcc.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockd.errors import HostError, LockdError, refusal
from lockd.kernel.calls import BtfFacts, MapFacts
from lockd.kernel.libbpf import libbpf
from lockd.kernel.manifest import Layout
from lockd.load.compiled import CompileCache, Compiled, MapDefinition, key_of, with_maps
from lockd.load.source import HEADERS, Source
from lockd.process import memory

log = logging.getLogger(__name__)

BPF_MAP_TYPE_ARRAY_OF_MAPS = 12
REFUSED_MAP = re.compile(r"could not open bpf map: (\S+), error: (.*)")
"""What bcc prints when it cannot create a map: the map's name, and the text of the errno."""
ERRNO_OF = {os.strerror(number): number for number in errno.errorcode}
POSSIBLE_CPUS = Path("/sys/devices/system/cpu/possible")


def compile_cached(source: Source, cache: CompileCache) -> Compiled:
    """Return the compiled source from the cache; if it is not there, compile the source and add the result.

    Raises as compile_source() does.
    """
    key = key_of(compile_inputs(source))
    if compiled := cache.find(key):
        log.info("the BPF programs were compiled by an earlier start and kept in %s", cache.directory)
        return compiled
    started = time.monotonic()
    compiled = compile_source(source)
    log.info("compiled the BPF programs in %.1f s", time.monotonic() - started)
    cache.add(key, compiled)
    return compiled


def compile_source(source: Source) -> Compiled:
    """Compile a source with bcc.

    Raises HostError if bcc cannot be imported or the kernel refuses a map for good. Raises LockdError with
    the compiler's messages, or if the kernel refuses a map for a reason that may be temporary.

    This needs the privileges for creating maps: bcc creates them while it compiles. They are closed with the
    rest of bcc's objects before this function returns.
    """
    os.environ["BCC_KERNEL_SOURCE"] = str(HEADERS)
    try:
        from bcc import BPF, lib  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise HostError(
            f"bcc: cannot be imported by {sys.executable}: {error}; install the package "
            "python3-bpfcc, and run lockd with the system's own python3"
        ) from error
    with _native_stderr() as printed:
        try:
            unit: Any = BPF(text=source.text)
        except Exception as error:
            if refused := REFUSED_MAP.search(printed()):
                number = ERRNO_OF.get(refused[2], 0)
                raise refusal(f"{refused[1]}: the kernel refuses the map: {refused[2]}", number) from error
            raise LockdError(f"the BPF programs do not compile: {error}\n{printed()}") from error
    try:
        return _extract(unit, lib)
    finally:
        unit.cleanup()


def compile_inputs(source: Source) -> tuple[str, ...]:
    """Return everything that the compiled source depends on. This does not import bcc.

    bcc reads the type of the machine (uname -m) and two environment variables, besides BCC_KERNEL_SOURCE,
    which compile_source() sets. It also looks in kallsyms for bpf_probe_read_kernel(): whether this exists
    depends on the kernel's release alone. The type that bcc reports for a value of a per-CPU array has an
    element for each possible CPU.
    """
    return (
        source.text,
        *(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(HEADERS.rglob("*.h"))),
        *(os.environ.get(name, "") for name in ("ARCH", "BCC_LINUX_VERSION_CODE")),
        *(os.uname()[field] for field in (2, 3, 4)),  # the kernel's release and version, machine
        POSSIBLE_CPUS.read_text(),
        *_installed_bcc(),
    )


def _installed_bcc() -> tuple[str, ...]:
    """Return what identifies the installed bcc.

    The files of a rebuilt package have new modification times.
    """
    spec = find_spec("bcc")
    if not spec or not spec.origin:
        return ()
    package = Path(spec.origin)
    version = package.with_name("version.py")
    return str(package), str(package.stat().st_mtime_ns), version.read_text() if version.exists() else ""


def _extract(unit: Any, lib: Any) -> Compiled:
    """Return what bcc compiled, as values without descriptors."""
    tables = {name: unit[name] for name in _names(lib.bpf_num_tables, lib.bpf_table_name, unit)}
    facts = {name: _map_facts(int(table.map_fd)) for name, table in tables.items()}
    positions = {int(table.map_fd): index for index, table in enumerate(tables.values())}
    maps = tuple(
        MapDefinition(
            name=name,
            type=fact.type,
            key_size=fact.key_size,
            value_size=fact.value_size,
            entries=fact.max_entries,
            flags=fact.map_flags,
            # bcc does not report the inner map. All arrays of maps are pairs (see common.bpf.h).
            inner=f"{name}_0" if fact.type == BPF_MAP_TYPE_ARRAY_OF_MAPS else "",
            key_type=fact.btf_key_type_id,
            value_type=fact.btf_value_type_id,
            key=layout_of(tables[name].Key),
            value=layout_of(tables[name].Leaf),
        )
        for name, fact in facts.items()
    )
    functions = {
        name: with_maps(unit.dump_func(name.encode()), positions)
        for name in _names(lib.bpf_num_functions, lib.bpf_function_name, unit)
    }
    return Compiled(maps, functions, _btf(max(fact.btf_id for fact in facts.values())))


def _names(count: Any, name_of: Any, unit: Any) -> list[str]:
    """Return the names of a unit's tables or functions. bcc's Python module lists only the functions."""
    count.restype, count.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_size_t]
    return [name_of(unit.module, index).decode() for index in range(count(unit.module))]


def _map_facts(fd: int) -> MapFacts:
    facts = MapFacts()
    _read_facts(fd, facts)
    return facts


def _btf(btf_id: int) -> bytes:
    """Return the type information (BTF) with this id, which bcc loaded; empty if it is not found.

    bcc has a descriptor of it but does not return it, so all descriptors of this process are searched. To
    open another descriptor of it by the id takes CAP_SYS_ADMIN.
    """
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry) == "anon_inode:btf":
                facts = BtfFacts()
                _read_facts(int(entry.name), facts)
                if facts.id == btf_id:
                    content = ctypes.create_string_buffer(facts.btf_size)
                    facts = BtfFacts(btf=ctypes.addressof(content), btf_size=len(content))
                    _read_facts(int(entry.name), facts)
                    return content.raw
    return b""


def _read_facts(fd: int, facts: ctypes.Structure) -> None:
    size = ctypes.c_uint32(ctypes.sizeof(facts))
    if libbpf().bpf_obj_get_info_by_fd(fd, ctypes.byref(facts), ctypes.byref(size)):
        raise LockdError(f"what bcc made: {os.strerror(ctypes.get_errno())}")


def layout_of(ctype: Any) -> Layout | str:
    """Return what numpy.dtype() takes for a ctypes type, which bcc derives from the C declaration."""
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
    """Redirect descriptor 2, to which clang prints, to memory; yield a function that returns the content."""
    saved = os.dup(2)
    with os.fdopen(memory.create_file("stderr"), "w+b") as file:
        os.dup2(file.fileno(), 2)

        def printed() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield printed
        finally:
            os.dup2(saved, 2)
            os.close(saved)
