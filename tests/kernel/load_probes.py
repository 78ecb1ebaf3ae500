"""Compile the programs for fentry and for kprobes and load them, also where the kernel cannot attach them.

test_bcc_versions.py runs this with the Python of a release of Debian. Prints the functions loaded by each
mechanism as JSON, and fails with the verifier's words if the kernel refuses one.
"""

from __future__ import annotations

import json
import sys

from lockd.kernel.btf import KernelTypes
from lockd.load import programs
from lockd.load.bpf_object import BpfObject
from lockd.load.choose import Choice
from lockd.load.compile import compile_source
from lockd.load.hooks import Part, Way, parts_of
from lockd.load.host import Host
from lockd.load.settings import LoadSettings
from lockd.load.source import source_for

PROGRAMS = ("futex", "offcpu", "kernel_locks")
MECHANISMS = ("fentry", "kprobe")
LONGEST = 2**63 - 1
ARGUMENTS = 3
"""The number of arguments of a hooked function, as assumed here. The return value comes behind them."""


def main() -> None:
    host = Host(KernelTypes())
    json.dump({mechanism: loaded(mechanism, host) for mechanism in MECHANISMS}, sys.stdout)


def loaded(mechanism: str, host: Host) -> list[str]:
    """Load the BPF functions that do each part of the work by this mechanism.

    For a part that has no way by this mechanism, its first way is loaded. Returns the names of the functions,
    each with the values that it is given (Candidate.given).
    """
    choices = [choice(part, mechanism) for part in parts_of(PROGRAMS, "all", "calls")]
    settings = LoadSettings(PROGRAMS, 1024, 1024, 1024, 0, LONGEST, "all", "calls", ())
    source = source_for(settings, choices, host)
    bpf_object = BpfObject(compile_source(source), source, host)
    hooks = {" ".join((hook.function, *hook.given)): hook for one in choices for hook, _ in one.hooks}
    for hook in hooks.values():
        # Functions for fentry are loaded as raw tracepoint programs: they find arguments in the same places.
        as_what = "raw_tracepoint" if hook.mechanism in ("fentry", "fexit") else hook.mechanism
        programs.load(bpf_object.code_for(hook, ARGUMENTS), hook.function, as_what)
    return sorted(hooks)


def choice(part: Part, mechanism: str) -> Choice:
    way: Way = next((way for way in part.ways if way.mechanism == mechanism), part.ways[0])
    return Choice(part, way, tuple((hook, "") for hook in way.hooks), "")


if __name__ == "__main__":
    main()
