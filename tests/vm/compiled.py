"""Compiles the BPF programs that a machine's tests need outside of it: inside, clang takes a minute for each.

Usage, after `python3 -m tests.vm.compiled`:
       list [ASKED]              in the machine: prints the sources that its tests will ask for, as JSON
       compile DIRECTORY <JSON   on the machine's userland: compiles them into files of lockd's cache

The list need not be complete: lockd itself compiles what is not in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockd.load.hooks import SYSTEM_CALL

if TYPE_CHECKING:
    from lockd.trace.probes.patterns import Probes
    from tests.machine.qemu import Machine

CACHE = "/var/cache/lockd"
"""The cache of lockd in the machine."""
PYTHON = "/usr/bin/python3"
PROGRAMS = ("futex", "offcpu", "kernel_locks")
SMALL = {"maps": {"entries": 64, "threads": 64, "stacks": 64}}
CALLS, ALL = {"futex": "calls"}, {"kernel_locks": "all"}
Asked = Sequence[tuple[Sequence[str], dict[str, str], Sequence[str], dict[str, dict[str, int]]]]
ASKED: Asked = (
    (PROGRAMS, {}, ("auto",), {}),
    (PROGRAMS, CALLS, ("auto",), {}),
    (("futex",), {}, ("auto",), {}),
    (("futex",), CALLS, ("tracepoint", "fentry", "kprobe"), {}),
    (("kernel_locks",), ALL, ("auto", "fentry", "kprobe"), {}),
    (("kernel_locks",), {}, ("fentry", "kprobe"), SMALL),
    (("kernel_locks",), {}, ("auto", "fentry"), {}),
    (("futex", "kernel_locks"), CALLS | ALL, ("kprobe",), {}),
)
"""The daemons that tests start: programs, modes of programs, mechanisms and further sections of the
configuration."""
FUNCTION = f"{SYSTEM_CALL}getpgid"
"""A function to trace. It must exist; which one it is makes no difference to what is compiled."""
TRACES = (
    *(
        ("klock", "--mode", "all", "--mechanism", mechanism, "--format", form)
        for mechanism in ("fentry", "kprobe")
        for form in ("csv", "json")
    ),
    *(
        ("stackcount", FUNCTION, "-p", "1", "--mechanism", mechanism, *more)
        for mechanism, more in (("fentry", ()), ("kprobe", ()), ("kprobe", ("-K",)))
    ),
    ("stacksnoop", FUNCTION, "-p", "1"),
)
"""Command lines of one-shot tools as tests start them. The modules of these tools have settings_of()."""
STACKCOUNTS = tuple(words for words in TRACES if words[0] == "stackcount" and "-K" not in words)
BY_DEFAULT: Asked = ((PROGRAMS, {}, ("auto",), {}), (("kernel_locks",), ALL, ("auto",), {}))
SETS = {"all": (ASKED, TRACES), "gate": (BY_DEFAULT, STACKCOUNTS)}
"""What all tests ask for, and what the tests of `make test` ask for: daemons and command lines."""
CPUS = "/sys/devices/system/cpu/possible"
WITH_CPUS = f'mount --bind "$1" {CPUS}; shift; exec "$@"'
"""The script that runs a command with the machine's list of processors: per-CPU maps are described with the
number of processors."""


def listed(asked_for: Asked | str = "all") -> dict[str, str]:
    """Return sources by the names of their files in the cache, for these daemons or for one of SETS."""
    from lockd.cli import _parser
    from lockd.config.reader import read_text
    from lockd.config.schema import Config
    from lockd.kernel.btf import KernelTypes
    from lockd.load.choose import choices_for
    from lockd.load.compile import compile_inputs
    from lockd.load.compiled import key_of
    from lockd.load.host import Host
    from lockd.load.source import source_for
    from lockd.service.start import load_settings
    from lockd.trace.commands import TOOLS
    from lockd.trace.probes.pattern_options import resolve_probes

    host = Host(KernelTypes(), (FUNCTION,))
    wanted = []
    daemons, traces = SETS[asked_for] if isinstance(asked_for, str) else (asked_for, ())
    for programs, modes, mechanisms, sections in daemons:
        for mechanism in mechanisms:
            asked: dict[str, dict[str, object]] = {name: {"enabled": name in programs} for name in PROGRAMS}
            for name, mode in modes.items():
                asked[name]["mode"] = mode
            for name in {"futex", "kernel_locks"} & {*programs}:
                asked[name]["mechanism"] = mechanism
            wanted.append(
                load_settings(read_text(Config, json.dumps({"programs": asked, **sections}), "list"))
            )
    found: tuple[Probes, ...] = ()
    for words in traces:
        tool, args = TOOLS[words[0]], _parser(["trace"]).parse_args(["trace", *words])
        if FUNCTION in words:
            found = found or (resolve_probes(args, "list"),)
        wanted.append(tool.settings_of(args, *found))
    sources = {}
    for settings in wanted:
        choices = choices_for(settings, host)
        if all(choice.way for choice in choices):
            source = source_for(settings, choices, host)
            sources[key_of(compile_inputs(source))] = source.text
    return sources


def compile_into(directory: Path) -> None:
    from lockd.load.compile import compile_source
    from lockd.load.compiled import CompileCache
    from lockd.load.source import Source

    for key, text in json.load(sys.stdin).items():
        CompileCache(directory).add(key, compile_source(Source(text, {}, {})))


def give(machine: Machine, userland: Path, asked_for: Asked | str = "all") -> int:
    """Compile what `machine` will need on its own userland, and put it there. Return the number of files."""
    from tests.debian import inside

    words = ("list", json.dumps(asked_for))
    asked = machine.run(PYTHON, "-m", "tests.vm.compiled", *words, seconds=300, cwd="/work")
    assert asked.code == 0, asked.out
    with tempfile.TemporaryDirectory(prefix="lockd-compiled-", dir="/tmp") as name:
        cpus, directory = Path(name, "cpus"), Path(name, "cache")
        cpus.write_text(machine.shell(f"cat {CPUS}") + "\n")
        before = [*inside(userland), "sh", "-ec", WITH_CPUS, "-", cpus]
        command = [*before, PYTHON, "-m", "tests.vm.compiled", "compile", directory]
        subprocess.run(command, input=asked.out, text=True, check=True)
        machine.shell(f"mkdir -m 700 {CACHE}")
        for file in directory.iterdir():
            machine.put(f"{CACHE}/{file.name}", file.read_bytes())
        return len(list(directory.iterdir()))


if __name__ == "__main__":
    if sys.argv[1] == "list":
        json.dump(listed(*(json.loads(word) for word in sys.argv[2:])), sys.stdout)
    else:
        compile_into(Path(sys.argv[2]))
