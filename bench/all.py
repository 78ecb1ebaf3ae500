"""Measure what lockd costs in all parts of the bench, and write one report.

`sudo make bench` runs every part, a program in this directory that writes bench/build/PART.json and .md. It
joins what they wrote to bench/build/report.json and report.md. Run it on an otherwise idle host.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import results, targets
from bench.comparison import Comparison

ROOT = Path(__file__).resolve().parents[1]
IDLE = 0.5
"""The largest load average, a number of threads, with which the host counts as idle."""


@dataclass(frozen=True)
class Part:
    """A part of the bench: bench/NAME.py. All parts have an option --quick."""

    name: str
    minutes: float
    """The minutes that the part takes, about."""
    quick_minutes: float
    arguments: tuple[str, ...] = ()
    """The arguments of the part if it is not to be quick."""


PARTS = (
    Part("overhead", 10, 3),
    Part("anatomy", 1.5, 0.5),
    Part("emulated", 5, 1.5),
    Part("startup", 2.5, 0.6, ("--churn", "1")),
    Part("cost", 1.2, 0.5),
    Part("sampler", 0.8, 0.3),
    Part("scrape", 1, 0.3),
    Part("idle", 0.8, 0.2),
    Part("names", 0.8, 0.3),
)


def run(parts: Sequence[Part], is_quick: bool, more: dict[str, list[str]]) -> dict[str, str]:
    """Run the parts one after another, with `more` arguments; return the reasons why some failed."""
    failed: dict[str, str] = {}
    for at, part in enumerate(parts):
        left = sum(one.quick_minutes if is_quick else one.minutes for one in parts[at:])
        _say(f"== {part.name}, part {at + 1} of {len(parts)}; about {left:.0f} min left")
        for ending in ("json", "md", "svg"):
            (results.BUILD / f"{part.name}.{ending}").unlink(missing_ok=True)
        arguments = [*(["--quick"] if is_quick else part.arguments), *more.get(part.name, [])]
        command = [sys.executable, "-m", f"bench.{part.name}", *arguments]
        if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed[part.name] = f"exit code {code}; what it printed says why"
        elif not (results.BUILD / f"{part.name}.json").exists():
            failed[part.name] = "left no figures"
        if part.name in failed:
            _say(f"== {part.name} failed: {failed[part.name]}")
    return failed


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def join(parts: Sequence[Part], host: dict[str, str], failed: dict[str, str], minutes: float) -> None:
    """Write the report from what the parts have left."""
    data: dict[str, Any] = {"host": host, "minutes": minutes, "failed": failed, "parts": {}}
    text = "# What lockd costs\n\nMade by `sudo make bench` in "
    text += f"{minutes:.0f} minutes.\n\n| host | |\n|---|---|\n"
    text += "".join(f"| {name} | {value} |\n" for name, value in host.items())
    if results.TRACED_BEFORE in host or float(host.get(results.LOAD_BEFORE, 0)) > IDLE:
        text += "\n**The host was not idle, or others traced it: these figures are not lockd's alone.**\n"
    for part in parts:
        if (results.BUILD / f"{part.name}.json").exists():
            data["parts"][part.name] = json.loads((results.BUILD / f"{part.name}.json").read_text())
    if overhead := data["parts"].get("overhead"):
        text += f"\n## Targets\n\n{targets.table(Comparison.from_json(overhead))}"
    for part in parts:
        if part.name in data["parts"]:
            text += "\n" + lowered((results.BUILD / f"{part.name}.md").read_text())
    if failed:
        text += "\n## Failed\n\n" + "".join(f"- {name}: {reason}\n" for name, reason in failed.items())
    results.write("report", data, text)


def lowered(markdown: str) -> str:
    """The same text with all headings one level deeper."""
    return re.sub("^#", "##", markdown, flags=re.MULTILINE)


def main() -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and short runs, to see that all works")
    parser.add_argument("--parts", default=",".join(names), help="default: %(default)s")
    parser.add_argument("--skip", default="", help="parts, with commas between")
    parser.add_argument("--rounds", help="of the part overhead")
    args = parser.parse_args()
    asked, skipped = args.parts.split(","), args.skip.split(",")
    if unknown := {*asked, *skipped} - {*names, ""}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    parts = [part for part in PARTS if part.name in asked and part.name not in skipped]
    host, began = results.host(), time.monotonic()
    failed = run(parts, args.quick, {"overhead": ["--rounds", args.rounds] if args.rounds else []})
    join(parts, host, failed, (time.monotonic() - began) / 60)
    _say(f"the report: {results.BUILD / 'report.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
