"""Leaves out of numpy what lockd never uses: a third of its memory, and the threads of its algebra library.

Called as the packages that use numpy are imported, hence before it is.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

UNUSED = ("ctypeslib", "fft", "ma", "polynomial", "random", "typing")
"""Modules that numpy itself imports (before numpy 2) or that only annotations name."""


class Later(ModuleType):
    """Stands for a module until something of it is asked for, which imports it.

    Unlike those of importlib.util.LazyLoader, which are also imported by `from package import module`.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system asks for those
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def leave_out() -> None:
    """To be called before the first import of numpy; later it does nothing."""
    numpy = None if "numpy" in sys.modules else find_spec("numpy")
    if not numpy:
        return
    # OpenBLAS starts a thread for each processor as it is loaded: each would keep the capabilities that the
    # process then has, whatever the process gives up later (process/privileges.py).
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    places = numpy.submodule_search_locations or []
    if any((Path(place) / "_core").is_dir() for place in places):
        return  # numpy 2 imports them when they are asked for, and would look for itself in a stand-in
    for name in UNUSED:
        spec = PathFinder.find_spec(f"numpy.{name}", places)
        if spec:
            module = module_from_spec(spec)
            module.__class__ = Later
            sys.modules[spec.name] = module
