"""Compiles the programs for fentry and for kprobes and loads them, also where the kernel cannot attach them.

Run by the Python of some release (see test_bcc_versions.py). Prints the functions loaded by each mechanism;
fails with the verifier's words if one is refused.
"""

from __future__ import annotations

import json
import sys

from lockd.load import attach
from lockd.load.btf import KernelTypes
from lockd.load.choose import Choice
from lockd.load.compile import Module
from lockd.load.hooks import Candidate, Part, Way, parts_of
from lockd.load.host import Host, ensure_tracefs
from lockd.load.loader import source_for
from lockd.load.settings import LoadSettings

PROGRAMS = ("futex", "offcpu", "kernel_locks")
MECHANISMS = ("fentry", "kprobe")
LONGEST = 2**63 - 1
BPF_PROG_TYPE_RAW_TRACEPOINT = 17
ARGUMENTS = 3
"""Of a function that is hooked; what it returns comes next."""


def main() -> None:
    host = Host(KernelTypes(), ensure_tracefs())
    json.dump({mechanism: loaded(mechanism, host) for mechanism in MECHANISMS}, sys.stdout)


def loaded(mechanism: str, host: Host) -> list[str]:
    """The functions of this mechanism, or the first that a part has, with what each is given."""
    choices = [choice(part, mechanism) for part in parts_of(PROGRAMS, "all")]
    settings = LoadSettings(PROGRAMS, 1024, 1024, 1024, 0, LONGEST, "all", ())
    module = Module(source_for(settings, choices, host))
    hooks = {" ".join((hook.function, *hook.given)): hook for one in choices for hook, _ in one.hooks}
    for hook in hooks.values():
        if hook.mechanism in attach.ATTACH_TYPES:
            load(module, hook)
        else:
            module._load(hook)
    return sorted(hooks)


def choice(part: Part, mechanism: str) -> Choice:
    way: Way = next((way for way in part.ways if way.mechanism == mechanism), part.ways[0])
    return Choice(part, way, tuple((hook, "") for hook in way.hooks), "")


def load(module: Module, hook: Candidate) -> None:
    """What is for fentry as a raw tracepoint's program, which has its arguments in the same places."""
    constants = tuple(
        members.index(prefix + word.upper())
        for (members, prefix), word in zip(module._meanings, hook.given, strict=False)
    )
    given = attach.Given(module._given_base, ARGUMENTS, constants)
    code = given.put_into(module._bpf.dump_func(hook.function.encode()))
    if hook.mechanism in ("kprobe", "kretprobe"):
        attach.load(code, hook.function, hook.mechanism)
        return
    from bcc import lib

    of_type = (BPF_PROG_TYPE_RAW_TRACEPOINT, hook.function.encode(), code, len(code), b"GPL", 0)
    if lib.bcc_func_load(module._bpf.module, *of_type, 0, None, 0, None, -1) < 0:
        sys.exit(f"{hook.function}: refused")


if __name__ == "__main__":
    main()
