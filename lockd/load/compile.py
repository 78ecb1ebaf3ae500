"""The one door to bcc: a source becomes maps to be made and code to be loaded."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockd.errors import HostError, LockdError
from lockd.kernel.calls import BtfFacts, MapFacts
from lockd.kernel.libbpf import libbpf
from lockd.kernel.manifest import Layout
from lockd.load.compiled import Compiled, MapDefinition, with_maps
from lockd.load.source import HEADERS, Source

BPF_MAP_TYPE_ARRAY_OF_MAPS = 12
POSSIBLE_CPUS = Path("/sys/devices/system/cpu/possible")


def compile_source(source: Source) -> Compiled:
    """Compile with bcc. Raises LockdError with the compiler's words, HostError without bcc.

    bcc makes the maps as well, and they are gone again with all else of it; so this needs privileges.
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
            module: Any = BPF(text=source.text)
        except Exception as error:
            raise LockdError(f"the BPF programs do not compile: {error}\n{printed()}") from error
    try:
        return _taken_from(module, lib)
    finally:
        module.cleanup()


def what_decides(source: Source) -> tuple[str, ...]:
    """Everything that the result depends on, found without importing bcc.

    Of the host bcc looks at two variables and the machine. It asks kallsyms whether the kernel has
    bpf_probe_read_kernel(), which a release of it has or has not. What bcc calls the type of a per-CPU
    array's value has an element for each CPU.
    """
    return (
        source.text,
        *(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(HEADERS.rglob("*.h"))),
        *(os.environ.get(name, "") for name in ("ARCH", "BCC_LINUX_VERSION_CODE")),
        *(os.uname()[at] for at in (2, 3, 4)),
        POSSIBLE_CPUS.read_text(),
        *_installed_bcc(),
    )


def _installed_bcc() -> tuple[str, ...]:
    """Which one it is. Files of a package that was built anew have new times."""
    spec = find_spec("bcc")
    if not spec or not spec.origin:
        return ()
    package = Path(spec.origin)
    version = package.with_name("version.py")
    return str(package), str(package.stat().st_mtime_ns), version.read_text() if version.exists() else ""


def _taken_from(module: Any, lib: Any) -> Compiled:
    names = _names(lib.bpf_num_tables, lib.bpf_table_name, module)
    tables = {name: module[name] for name in names}
    facts = {name: _map_facts(int(table.map_fd)) for name, table in tables.items()}
    positions = {int(table.map_fd): at for at, table in enumerate(tables.values())}
    maps = tuple(
        MapDefinition(
            name=name,
            type=fact.type,
            key_size=fact.key_size,
            value_size=fact.value_size,
            entries=fact.max_entries,
            flags=fact.map_flags,
            # bcc does not tell; see common.bpf.h for pairs.
            inner=f"{name}_0" if fact.type == BPF_MAP_TYPE_ARRAY_OF_MAPS else "",
            key_type=fact.btf_key_type_id,
            value_type=fact.btf_value_type_id,
            key=layout_of(tables[name].Key),
            value=layout_of(tables[name].Leaf),
        )
        for name, fact in facts.items()
    )
    functions = {
        name: with_maps(module.dump_func(name.encode()), positions)
        for name in _names(lib.bpf_num_functions, lib.bpf_function_name, module)
    }
    return Compiled(maps, functions, _btf(max(fact.btf_id for fact in facts.values())))


def _names(count: Any, name_of: Any, module: Any) -> list[str]:
    """Of tables or functions; bcc's Python offers one of the two only."""
    count.restype, count.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_size_t]
    return [name_of(module.module, at).decode() for at in range(count(module.module))]


def _map_facts(fd: int) -> MapFacts:
    facts = MapFacts()
    _facts(fd, facts)
    return facts


def _btf(wanted: int) -> bytes:
    """The type information that bcc loaded. It keeps the descriptor to itself, and another one could be had
    with CAP_SYS_ADMIN only."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry) == "anon_inode:btf":
                facts = BtfFacts()
                _facts(int(entry.name), facts)
                if facts.id == wanted:
                    content = ctypes.create_string_buffer(facts.btf_size)
                    facts = BtfFacts(btf=ctypes.addressof(content), btf_size=len(content))
                    _facts(int(entry.name), facts)
                    return content.raw
    return b""


def _facts(fd: int, facts: ctypes.Structure) -> None:
    size = ctypes.c_uint32(ctypes.sizeof(facts))
    if libbpf().bpf_obj_get_info_by_fd(fd, ctypes.byref(facts), ctypes.byref(size)):
        raise LockdError(f"what bcc made: {os.strerror(ctypes.get_errno())}")


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
    """Catch what clang prints to descriptor 2, to show it only with an error."""
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
