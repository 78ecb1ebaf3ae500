"""Measure what tracing costs in instructions, on an emulated machine whose kernel has fentry and kprobes.

`sudo .venv/bin/python -m bench.emulated [--quick] [--kernel 6.12]` writes bench/build/emulated.json, .md and
.svg. In the machine a nanosecond passes with each instruction (tests/machine). Figures are therefore numbers
of instructions, and hardly differ from run to run, whatever else this host does. They do not say how long an
instruction takes, for example one that waits for memory. bpftrace and the tools of bcc are copied from this
host.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.comparison import Comparison
from bench.loads import built
from bench.overhead import write
from bench.variants import NO_HOLDERS, NO_WAIT_SAMPLES
from tests.machine.base import base, make_image
from tests.vm import compiled, guests, kernels
from tests.vm.inside import ENVIRONMENT

HERE = Path(__file__).resolve().parent

TITLE = "What tracing costs in instructions"
PROGRAMS = "bench/build/programs"
TOOLS = "tools"
"""Directories of the machine's checkout: our compiled load programs, and the tools of others."""
BCC = ("offcputime-bpfcc", "offwaketime-bpfcc", "klockstat-bpfcc")
VARIANTS = (
    "untraced", "floor", "lockd", "lockd, no holders", "lockd, no wait samples", "floor, every call",
    "lockd, every call", "floor, every call by fentry", "lockd, every call by fentry",
    "floor, every call by kprobe", "lockd, every call by kprobe", "lockd: kernel_locks",
    "lockd: kernel_locks, all", "bcc klockstat", "bcc offcputime", "bcc offwaketime", "bpftrace: futex",
    "bpftrace: off-CPU", "locktrace-like",
)  # fmt: skip
QUICK = (
    "untraced", "floor", "lockd", "lockd, no holders", "lockd, no wait samples", "floor, every call",
    "lockd, every call", "bpftrace: futex",
)  # fmt: skip
ASKED: compiled.Asked = (
    (compiled.PROGRAMS, {}, ("auto",), {}),
    (compiled.PROGRAMS, {}, ("auto",), NO_HOLDERS),
    (compiled.PROGRAMS, {}, ("auto",), NO_WAIT_SAMPLES),
    (compiled.PROGRAMS, {"futex": "calls"}, ("auto", "fentry", "kprobe"), {}),
    (("kernel_locks",), {}, ("auto",), {}),
    (("kernel_locks",), {"kernel_locks": "all"}, ("auto",), {}),
)
"""BPF programs that are compiled outside of the machine, because clang would take minutes for them inside."""
RUNS = 101
"""Runs of each of bench/programs, of which the median is taken. The shortest runs take a millisecond, and the
processors of a machine share its clock: work of lockd itself on the other processor lengthens them. Of 50
medians of 15 runs, one was more than twice as large as the others."""
FOUND = "/tmp/found"
SECONDS = 3600.0


def make_checkout(root: Path) -> None:
    """Make what the machine finds at /work: the checkout, our programs compiled, and the tools of others."""
    guests.make_checkout(root)
    shutil.copytree(HERE, root / "bench", ignore=shutil.ignore_patterns("build", "__pycache__"))
    built(root / PROGRAMS, "-static")
    tools = root / TOOLS
    tools.mkdir()
    for name in BCC:
        shutil.copy2(f"/usr/sbin/{name}", tools)
    if bpftrace := shutil.which("bpftrace"):
        shutil.copy2(bpftrace, tools)
        for library in _libraries(Path(bpftrace)):
            if not (base() / "root" / library.relative_to("/")).exists():
                shutil.copy2(library.resolve(), tools / library.name)


def _libraries(program: Path) -> list[Path]:
    linked = subprocess.check_output(["ldd", program], text=True)
    return [Path(path) for path in re.findall(r"=> (/\S+)", linked)]


def measured(series: str, variants: tuple[str, ...]) -> dict[str, object]:
    """Run bench.overhead in a machine with this kernel, and return what it writes as JSON."""
    with tempfile.TemporaryDirectory(prefix="lockd-bench-", dir="/var/tmp") as name:
        root, disk = Path(name, "root"), Path(name, "disk")
        make_checkout(root)
        make_image(root, disk, "512M")
        with guests.booted(kernels.kernel_of(series), disk, sleep="on") as machine:
            compiled.give(machine, base() / "root", ASKED)
            tools = f"{guests.WORK}/{TOOLS}"
            done = machine.run(
                "/usr/bin/python3", "-m", "bench.overhead", "--json", FOUND, "--rounds", 1, "--runs", RUNS,
                "--programs", PROGRAMS, "--loads", "futex,pipe,mutex", "--variants", ";".join(variants),
                seconds=SECONDS, cwd=guests.WORK, more=_say,
                env={**ENVIRONMENT, "PATH": f"{tools}:/usr/sbin:/usr/bin", "LD_LIBRARY_PATH": tools},
            )  # fmt: skip
            if done.code:
                raise RuntimeError(f"bench.overhead in the machine: exit code {done.code}:\n{done.out}")
            found: dict[str, object] = json.loads(machine.run("cat", FOUND).out)
    return found


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only what starts soon")
    parser.add_argument("--kernel", default="6.12", help="a series of tests/vm/kernels.py")
    args = parser.parse_args()
    data = measured(args.kernel, QUICK if args.quick else VARIANTS)
    host = data.pop("host")
    assert isinstance(host, dict)
    found = Comparison.from_json(data)
    found.loads = [(name, figure.replace("ns", "instructions"), *rest) for name, figure, *rest in found.loads]
    write("emulated", TITLE, found, host)
    return 0


if __name__ == "__main__":
    sys.exit(main())
