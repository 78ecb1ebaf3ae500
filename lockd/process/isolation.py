"""Runs a module of lockd that imports from lockd's own directory and from Python's, and from nowhere else.

    python3 -I lockd/process/isolation.py MODULE ARGUMENT...

`python3 -m` looks into the current directory first, and root would run what lies there under the name of a
library. -I does not (nor does -P, which Python 3.10 lacks), and leaves out PYTHONPATH and the user's own
packages as well.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ABOVE = str(Path(__file__).resolve().parents[2])


def command(module: str) -> list[str]:
    """What starts `module` with this process's interpreter; its arguments follow."""
    return [sys.executable, "-I", str(Path(__file__).resolve()), module]


if __name__ == "__main__":
    if ABOVE not in sys.path:  # it is there if lockd was installed among Python's packages
        sys.path.insert(0, ABOVE)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
