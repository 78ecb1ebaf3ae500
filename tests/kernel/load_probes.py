"""Compiles the programs for fentry and for kprobes and loads them, also where the kernel cannot attach them.

Run by the Python of some release (see test_bcc_versions.py). Prints the functions loaded by each mechanism;
fails with the verifier's words if one is refused.
"""

from __future__ import annotations

import json
import sys

from lockd.load.attach import ATTACH_TYPES
from lockd.load.btf import KernelTypes
from lockd.load.choose import Choice
from lockd.load.compile import Module
from lockd.load.hooks import Part, Way, parts_of
from lockd.load.host import Host, ensure_tracefs
from lockd.load.loader import source_for
from lockd.load.settings import LoadSettings

PROGRAMS = ("futex", "offcpu", "kernel_locks")
MECHANISMS = ("fentry", "kprobe")
LONGEST = 2**63 - 1
BPF_PROG_TYPE_RAW_TRACEPOINT = 17
CALL_GET_FUNC_RET, RETURN_0 = bytes.fromhex("85000000 b8000000"), bytes.fromhex("b7000000 00000000")


def main() -> None:
    host = Host(KernelTypes(), ensure_tracefs())
    json.dump({mechanism: loaded(mechanism, host) for mechanism in MECHANISMS}, sys.stdout)


def loaded(mechanism: str, host: Host) -> list[str]:
    """The functions of all parts with this mechanism, or the first that a part has."""
    choices = [choice(part, mechanism) for part in parts_of(PROGRAMS, "all")]
    settings = LoadSettings(PROGRAMS, 1024, 1024, 1024, 0, LONGEST, "all", ())
    module = Module(source_for(settings, choices, host))
    hooks = {hook.function: hook for one in choices for hook, _ in one.hooks}
    for function, hook in hooks.items():
        if hook.mechanism in ATTACH_TYPES:
            load_as_raw_tracepoint(module, function)
        else:
            module._load(hook)
    return sorted(hooks)


def choice(part: Part, mechanism: str) -> Choice:
    way: Way = next((way for way in part.ways if way.mechanism == mechanism), part.ways[0])
    return Choice(part, way, tuple((hook, "") for hook in way.hooks), "")


def load_as_raw_tracepoint(module: Module, function: str) -> None:
    """What is for fentry, on kernels that do not allow it too.

    Arguments are where raw tracepoints have them; only what a function returns is not to be had there.
    """
    from bcc import lib

    code = module._bpf.dump_func(function.encode()).replace(CALL_GET_FUNC_RET, RETURN_0)
    of_type = (BPF_PROG_TYPE_RAW_TRACEPOINT, function.encode(), code, len(code), b"GPL", 0)
    if lib.bcc_func_load(module._bpf.module, *of_type, 0, None, 0, None, -1) < 0:
        sys.exit(f"{function}: refused")


if __name__ == "__main__":
    main()
