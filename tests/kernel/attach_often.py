"""Create the maps, load the programs, attach them as configured and close everything, many times.

Usage: attach_often.py CONFIG TIMES. Prints the number of attached hooks for each time. Exits with 3 if this
host cannot attach a part of what is configured.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from lockd.config.reader import read_text
from lockd.config.schema import Config
from lockd.errors import HostError
from lockd.kernel.btf import KernelTypes
from lockd.load.bpf_object import BpfObject
from lockd.load.choose import choices_for
from lockd.load.compile import compile_cached
from lockd.load.compiled import CompileCache, default_directory
from lockd.load.host import Host
from lockd.load.source import source_for
from lockd.service.start import load_settings

AT_A_TIME = 8
"""The number of threads that attach and detach. The kernel makes every detachment wait."""
HOOKS = 2
"""The most hooks that are attached for each part of the work. An emulated machine takes long for each."""


def main(config: str, times: int) -> int:
    settings = load_settings(read_text(Config, config, "CONFIG"))
    host = Host(KernelTypes())
    choices = choices_for(settings, host)
    for choice in choices:
        if not choice.way:
            print(choice.instead_of, file=sys.stderr)
            return HostError.exit_code
    source = source_for(settings, choices, host)
    code = compile_cached(source, CompileCache(default_directory()))
    hooks = [hook for choice in choices for hook, why_not in choice.hooks[:HOOKS] if not why_not]

    def attach_and_detach(_: int) -> int:
        bpf_object = BpfObject(code, source, host)
        attached = len([bpf_object.attach(hook) for hook in hooks])
        bpf_object.close()
        return attached

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for attached in pool.map(attach_and_detach, range(times)):
            print(attached, flush=True)
    return 0


sys.exit(main(sys.argv[1], int(sys.argv[2])))
