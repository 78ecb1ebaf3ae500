"""Attach to hooks of a mechanism and detach, again and again; then end without another word.

Usage: attach_often.py MECHANISM TIMES. Prints the number of attached hooks of each time; 3: it cannot be had.
"""

from __future__ import annotations

import os
import sys

from lockd.errors import HostError
from lockd.load.btf import KernelTypes
from lockd.load.choose import choices_for
from lockd.load.host import Host, ensure_tracefs
from lockd.load.kept import Kept, default_directory
from lockd.load.loader import compiled, source_for
from lockd.load.module import Module
from lockd.load.settings import LoadSettings

HOOKS = 8
"""Of each part of the work. An emulated machine takes its time for each."""


def main(mechanism: str, times: int) -> int:
    programs = ("futex", "offcpu", "kernel_locks")
    settings = LoadSettings(
        programs, entries=1024, threads=1024, stacks=64, min_block_ns=0, max_block_ns=0,
        lock_mode="contention" if mechanism == "tracepoint" else "all",
        mechanisms=(("futex", mechanism), ("kernel_locks", mechanism)),
    )  # fmt: skip
    host = Host(KernelTypes(), ensure_tracefs())
    choices = choices_for(settings, host)
    for choice in choices:
        if not choice.way:
            print(choice.instead_of or choice.hooks[0][1], file=sys.stderr)
            return HostError.exit_code
    source = source_for(settings, choices, host)
    module = Module(compiled(source, Kept(default_directory())), source, host)
    hooks = [hook for choice in choices for hook, why_not in choice.hooks[:HOOKS] if not why_not]
    for _ in range(times):
        attachments = [module.attach(hook)[1] for hook in hooks]
        print(len(attachments), flush=True)
        for fd in attachments:
            os.close(fd)
    os._exit(0)  # what is attached and what is not is left to the kernel


sys.exit(main(sys.argv[1], int(sys.argv[2])))
