"""Runs harnesses: `python -m tests.fuzz [NAME...] [--runs N] [--seconds S]`, or `make fuzz`. See README.md.

Each harness runs in a child process by atheris, which is guided by the code of lockd that an input reaches.
Findings are kept beside the corpus in tests/fuzz/build, and an exception does not end the run. `--replay N`
runs the seeds and N inputs that are made from them without atheris, the same each time.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import mmap
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tests.fuzz.harness import Harness, be_limited, execute

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"
MODULES = ("texts", "web", "messages", "objects", "memory", "stored")
MEMORY = 768 << 20
"""The bytes of data that a child may have. The namer, which reads the largest files, may have 512 MiB."""
WALL_SECONDS = 300
"""The seconds for one input after which libFuzzer ends the child: nothing else interrupts a C library."""
MOST_DEATHS = 20


def harnesses(names: Sequence[str] = MODULES) -> dict[str, Harness]:
    """Return the harnesses of some modules by name. With atheris, call it where imports are instrumented."""
    modules = [importlib.import_module(f"tests.fuzz.{name}") for name in names]
    return {one.name: one for module in modules for one in module.HARNESSES}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of harnesses (default: all)")
    parser.add_argument("--runs", type=int, default=100_000, help="executions of each (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=0, help="at most so long for each (default: no limit)")
    parser.add_argument(
        "--replay", type=int, metavar="N", help="without atheris: the seeds, and N made from them"
    )
    parser.add_argument("--seed", type=int, default=0, help="of --replay: others than by default")
    parser.add_argument("--input", type=Path, help="without atheris: the one input in this file")
    parser.add_argument("--module", choices=MODULES, help="only those of this module")
    parser.add_argument("--list", action="store_true", help="only tell the names")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return _fuzz(args.child, args.module, args.runs, args.seconds)
    known = harnesses((args.module,) if args.module else MODULES)
    if unknown := set(args.names) - set(known):
        parser.error(f"there is no harness {', '.join(unknown)}; rule: of {', '.join(known)}")
    chosen = args.names or list(known)
    if args.list:
        print("\n".join(chosen))
        return 0
    if args.input or args.replay is not None:
        be_limited(MEMORY)
        with tempfile.TemporaryDirectory(prefix="lockd-fuzz-") as tempfile.tempdir:
            if args.input:
                execute(known[chosen[0]], args.input.read_bytes())
                return 0
            _be_quiet()
            return _conclude([_replay(known[name], args.replay, args.seed, args.seconds) for name in chosen])
    if importlib.util.find_spec("atheris") is None:
        print(
            f"fuzz: atheris is not installed for Python {platform.python_version()}, and may have no build"
            " for it: it has some for few versions; rule: `make fuzz` with another Python, or without atheris"
            " `python -m tests.fuzz --replay 10000`"
        )
        return 1
    modules = {one.name: module for module in MODULES for one in harnesses((module,)).values()}
    results = [_run(name, modules[name], args.runs, args.seconds) for name in chosen]
    return _conclude(results)


def _conclude(results: Sequence[Result]) -> int:
    """Print the number of all executions. Return the exit code: 1 if anything was found."""
    print(f"{'all':12} {sum(one.executions for one in results):>10,} executions")
    return int(any(one.crashes for one in results))


def _be_quiet() -> None:
    logging.getLogger().addHandler(logging.NullHandler())


class Findings:
    """The findings of one harness, of which the first input of each sort is kept in a file."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self.places: dict[str, None] = {}

    def execute(self, data: bytes) -> None:
        try:
            execute(self._harness, data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            place = _place_of(error)
            if place not in self.places:
                self.places[place] = None
                kept = _keep(self._harness.name, place, data)
                traceback.print_exc()
                print(f"{self._harness.name}: the input is in {kept}", file=sys.stderr, flush=True)


def _replay(harness: Harness, count: int, seed: int, seconds: int) -> Result:
    seeds = list(harness.seeds())
    assert seeds, f"{harness.name} has no seeds"
    findings, chance, began = Findings(harness), random.Random(f"{harness.name} {seed}"), time.monotonic()
    for data in seeds:
        findings.execute(data)
    done = 0
    while done < count and not (seconds and time.monotonic() > began + seconds):
        done += 1
        findings.execute(harness.mutate(chance.choice(seeds), chance)[: harness.longest])
    result = Result(len(seeds) + done, time.monotonic() - began, "", tuple(findings.places))
    result.tell(harness.name)
    return result


def _keep(name: str, what: str, data: bytes) -> Path:
    directory = BUILD / name / "crashes"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{what}-{sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


@dataclass(frozen=True)
class Result:
    executions: int
    seconds: float
    coverage: str
    crashes: tuple[str, ...]

    def tell(self, name: str) -> None:
        print(
            f"{name:12} {self.executions:>10,} executions {self.seconds:>7.1f} s"
            f" {self.executions / max(self.seconds, 0.001):>8,.0f} a second  {self.coverage:40}"
            f"  new crashes: {len(self.crashes)} {' '.join(self.crashes[:8])}",
            flush=True,
        )


def _run(name: str, module: str, runs: int, seconds: int) -> Result:
    """Run a harness in child processes. When a child dies of an input, a new one goes on."""
    directory = BUILD / name
    (directory / "corpus").mkdir(parents=True, exist_ok=True)
    (directory / "crashes").mkdir(exist_ok=True)
    before = set((directory / "crashes").iterdir())
    began, done, coverage = time.monotonic(), 0, "-"
    with tempfile.TemporaryDirectory(prefix="lockd-fuzz-") as temporary, open(directory / "log", "wb") as log:
        count = Path(temporary) / "count"
        for _ in range(MOST_DEATHS):
            count.write_bytes(bytes(mmap.PAGESIZE))
            left = seconds - int(time.monotonic() - began) if seconds else 0
            if done >= runs or (seconds and left <= 0):
                break
            child = subprocess.run(
                [
                    sys.executable, "-m", "tests.fuzz", "--child", name, "--module", module,
                    f"--runs={runs - done}", f"--seconds={left}",
                ],
                cwd=HERE.parents[1], stdout=log, stderr=log, check=False,
                env={**os.environ, "TMPDIR": temporary},
            )  # fmt: skip
            done += int.from_bytes(count.read_bytes()[:8], "little")
            if found := re.findall(rb"cov: (\d+) ft: (\d+) corp: (\d+)", (directory / "log").read_bytes()):
                coverage = "{} places, {} features, {} inputs".format(*(one.decode() for one in found[-1]))
            if child.returncode == 0:
                break
    new = sorted(path.name for path in set((directory / "crashes").iterdir()) - before)
    result = Result(done, time.monotonic() - began, coverage, tuple(new))
    result.tell(name)
    return result


def _fuzz(name: str, module: str, runs: int, seconds: int) -> int:
    """Fuzz in a child process. libFuzzer ends the process and does not return."""
    import atheris

    with atheris.instrument_imports(include=["lockd"], enable_loader_override=False):
        harness = harnesses((module,))[name]
    _be_quiet()
    directory = BUILD / name
    temporary = Path(tempfile.gettempdir())
    (temporary / "seeds").mkdir(exist_ok=True)
    for number, seed in enumerate(harness.seeds()):
        (temporary / "seeds" / str(number)).write_bytes(seed)
    (temporary / "words").write_text("".join(f'"{_escaped(word)}"\n' for word in harness.words))
    with open(temporary / "count", "r+b") as file:
        count = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")
    findings = Findings(harness)

    def one_input(data: bytes) -> None:
        count[0] += 1
        findings.execute(data)

    def another(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        return harness.mutate(bytes(data), chance)[:most]

    options = [
        f"-runs={runs}", f"-max_total_time={seconds}", f"-max_len={harness.longest}",
        f"-timeout={WALL_SECONDS}", f"-report_slow_units={WALL_SECONDS}", "-rss_limit_mb=2048",
        f"-artifact_prefix={directory}/crashes/", "-print_final_stats=1", "-len_control=0",
    ]  # fmt: skip
    if harness.words:
        options.append(f"-dict={temporary / 'words'}")
    atheris.Setup([sys.argv[0], *options, str(directory / "corpus"), str(temporary / "seeds")], one_input,
                  custom_mutator=another)  # fmt: skip
    be_limited(MEMORY)
    atheris.Fuzz()
    return 0


def _place_of(error: BaseException) -> str:
    """Return what tells exceptions apart: the type, and the place in lockd or, if there is none, in the
    harness.
    """
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/lockd/" in frame.filename] or frames
    return f"{type(error).__name__}-{Path(inside[-1].filename).stem}-{inside[-1].lineno}"


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    sys.exit(main())
