"""Memory of lockd's processes: what Python's library and numpy import without need is not loaded, freed
memory is returned, and files in memory cannot be executed.

This module is imported before any other one, so it imports little itself.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType

SELDOM = (
    "ast", "curses", "difflib", "inspect", "ipaddress", "locale", "multiprocessing", "pickle", "platform",
    "tokenize", "logging.handlers",
)  # fmt: skip
"""Modules of Python's library that are imported by other modules, but hardly ever used.

For instance, dataclasses imports inspect, which Python before 3.12 uses only for classes without a docstring.
subprocess imports locale, linecache tokenize, urllib.parse ipaddress, and tornado the modules for its own
log. The last one comes last because the package logging imports others of them.
"""
UNUSED = ("core._add_newdocs", "ctypeslib", "fft", "ma", "polynomial", "random", "typing")
"""Modules of numpy that numpy before version 2 imports itself, or that only annotations name. The first one
only has texts for help()."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""
MFD_NOEXEC_SEAL = 0x8
"""The flag of memfd_create(2) for a file that nobody can ever make executable (Linux 6.3 and later)."""


class LazyModule(ModuleType):
    """Stands for a module until one of its attributes is read. Then the module is imported.

    importlib.util.LazyLoader is not enough: `from package import module` already makes it import the module.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system reads these, and must not cause the import
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def stub_seldom_used() -> None:
    """Keep modules of Python's library from being loaded before something of them is used.

    Call this before the first import of such a module. Later it does nothing for it.
    """
    for name in SELDOM:
        spec = None if name in sys.modules else find_spec(name)  # imports the package logging
        if spec:
            _stub(spec)


def stub_unused_numpy() -> None:
    """Keep numpy from loading what lockd does not use: a third of its memory, and the threads of OpenBLAS.

    Call this before the first import of numpy. Later it does nothing.
    """
    numpy = None if "numpy" in sys.modules else find_spec("numpy")
    if not numpy:
        return
    # OpenBLAS starts a thread for each processor when it is loaded. Each would keep the capabilities that the
    # process has at that time, whatever the process drops later (process/privileges.py).
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    places = numpy.submodule_search_locations or []
    # numpy 2 imports these modules on demand itself, and with a LazyModule its __getattr__() would recurse
    # without end. Its sign is this file: numpy 1.26 has a folder _core too (to read pickles of numpy 2), but
    # not the file.
    if any(os.path.exists(f"{place}/_core/numeric.py") for place in places):
        return
    for name in UNUSED:
        folder = name.rpartition(".")[0]
        spec = PathFinder.find_spec(f"numpy.{name}", [os.path.join(place, folder) for place in places])
        if spec:
            _stub(spec)


def _stub(spec: ModuleSpec) -> None:
    """Have a LazyModule stand for the module that `spec` describes."""
    module = module_from_spec(spec)
    module.__class__ = LazyModule
    sys.modules[spec.name] = module
    package, _, name = spec.name.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], name, module)


def return_freed_memory(block_bytes: int = 128 << 10) -> None:
    """Have the C library return freed blocks of at least `block_bytes` to the kernel.

    The next block of that size then costs page faults. glibc starts with 128 KiB as well, but raises this
    limit to the size of the last block that was freed, up to 32 MiB. Blocks below the raised limit come from
    the heap. Its holes stay resident, and so does unused memory at its end, up to twice the limit. musl has
    no such setting.
    """
    import ctypes  # not at the top: every command imports this module, and most do without ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, block_bytes)
        mallopt(M_TRIM_THRESHOLD, 2 * block_bytes)
        mallopt(M_ARENA_MAX, 1)


def create_file(name: str) -> int:
    """Create an empty file in memory (memfd), and return its descriptor. `name` is shown in /proc.

    Nobody can execute the file, where the kernel can ensure that: with vm.memfd_noexec=2, Linux 6.3 to 6.5
    refuse a file for which this is not asked. Raises OSError if there is no memory or no descriptor left.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, os.MFD_CLOEXEC)  # a kernel before 6.3
