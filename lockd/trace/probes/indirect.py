"""Which function an IFUNC stands for, such as `strlen`: the one that the linker has chosen for this host."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from lockd.names.objects.elfutils import ElfError
from lockd.names.objects.mappings import Mappings
from lockd.names.objects.object_file import ObjectFile


def chosen_function(file: ObjectFile, descriptor: int, name: str) -> int:
    """The file's own address of the function that `name` stands for in every program; -1 if not to be told.

    It can be for the C library that this very process uses: it has the same processor to choose for.
    """
    about = os.fstat(descriptor)
    mappings = Mappings(Path("/proc/self/maps").read_bytes())
    for mapping in mappings.code_files():
        if (mapping.device, mapping.inode) == (about.st_dev, about.st_ino):
            try:
                function = getattr(ctypes.CDLL(os.fsdecode(mapping.path)), name)
                address = ctypes.cast(function, ctypes.c_void_p).value or 0
                found = mappings.find(address)
                if found and found.inode == mapping.inode:
                    return address - file.bias(found)
            except (OSError, AttributeError, ElfError):
                return -1
    return -1
