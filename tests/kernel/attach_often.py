"""Attach everything that a mechanism can do, and end, again and again, each time in a process of its own.

Usage: attach_often.py MECHANISM TIMES. Prints the number of attached hooks of each time; 3: it cannot be had.
"""

from __future__ import annotations

import os
import sys

from lockd.errors import HostError
from lockd.load.loader import load
from lockd.load.settings import LoadSettings


def main(mechanism: str, times: int) -> int:
    mode = "contention" if mechanism == "tracepoint" else "all"
    settings = LoadSettings(
        programs=("futex", "offcpu", "kernel_locks"), entries=1024, threads=1024, stacks=64,
        min_block_ns=0, max_block_ns=0, lock_mode=mode,
        mechanisms=(("futex", mechanism), ("kernel_locks", mechanism)),
    )  # fmt: skip
    for _ in range(times):
        child = os.fork()
        if not child:
            os._exit(attach(settings))
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            return code
    return 0


def attach(settings: LoadSettings) -> int:
    try:
        loaded = load(settings)
    except HostError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(sum(hook.attached for hook in loaded.manifest.hooks), flush=True)
    return 0


sys.exit(main(sys.argv[1], int(sys.argv[2])))
