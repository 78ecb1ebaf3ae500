"""Runs a module of lockd, which can import only from lockd's own directory and from those of Python.

    python3 -I lockd/process/isolation.py MODULE ARGUMENT...

`python3 -m` searches the current directory first. Root would then execute any file there that has the name of
a library. `python3 -I` does not search it, and also ignores PYTHONPATH and the user's own packages. (`-P`
would be enough for the directory, but Python 3.10 does not have it.)
"""

from __future__ import annotations

import os
import runpy
import sys

_THIS = os.path.realpath(__file__)  # pathlib would load more than this module may (process/memory.py)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_THIS)))
"""The directory that the package lockd is in."""


def command(module: str) -> list[str]:
    """The command that runs `module` by this process's interpreter. The caller appends the arguments."""
    return [sys.executable, "-I", _THIS, module]


if __name__ == "__main__":
    if ROOT not in sys.path:  # else lockd is installed in a directory that Python searches anyway
        sys.path.insert(0, ROOT)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
