"""The support matrix of the README: which kernel measures what by which mechanisms, as last seen by tests/vm.

Usage: python3 -m tests.vm.matrix [RESULTS]

Writes the matrix into the README from tests/vm/results.json. With RESULTS, which a run leaves in
tests/vm/build/results.json, it replaces tests/vm/results.json by that file before.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.vm.inside import Run

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
README = HERE.parents[1] / "README.md"
BEGIN, END = "<!-- matrix: made by tests/vm/matrix.py -->\n", "<!-- end of matrix -->\n"
MECHANISMS = ("tracepoint", "fentry", "kprobe")
PARTS = ("futex calls", "offcpu switches", "kernel_locks waits", "kernel_locks holds")
"""The programs and what they measure, as doctor and the tests call it."""

Results = dict[str, dict[str, Any]]
"""Results by series: `release`, and by part, which mechanisms are `tested` and which one is `chosen`."""


@dataclass(frozen=True)
class HookRow:
    """A line of doctor's table."""

    program: str
    part: str
    by: str
    mechanism: str
    is_available: bool
    reason: str


def hooks_of(doctor: str) -> list[HookRow]:
    """Return the rows of the table that doctor printed."""
    _, _, table = doctor.partition("PROGRAM")
    rows = []
    for line in table.splitlines()[1:]:
        if not line:
            break
        program, part, by, hook, verdict = re.split(r"\s{2,}", line, maxsplit=4)
        word, _, reason = verdict.partition(": ")
        rows.append(HookRow(program, part, by, hook.split()[0], word == "yes", reason))
    return rows


def of_run(run: Run) -> dict[str, Any]:
    """Return what a run has shown: a mechanism counts as tested if tests of it passed and none failed.

    A test tells by properties which parts it is about: the name of the part, and the mechanism or `auto`.
    """
    found: dict[str, Any] = {"release": run.release}
    for part in PARTS:
        line = re.search(rf"^{part}: +by (\w+)", run.doctor, re.MULTILINE)
        chosen = line[1] if line else ""
        outcomes: dict[str, set[str]] = {}
        for case in run.cases:
            mechanism = case.properties.get(part, "")
            outcomes.setdefault(chosen if mechanism == "auto" else mechanism, set()).add(case.outcome)
        tested = [one for one in MECHANISMS if outcomes.get(one, set()) - {"skipped"} == {"passed"}]
        found[part] = {"tested": tested, "chosen": chosen}
    return found


def without_releases(results: Results) -> Results:
    """Return the results without the releases, which change with every update of a kernel."""
    return {
        series: {name: value for name, value in found.items() if name != "release"}
        for series, found in results.items()
    }


def results() -> Results:
    """Return the results as last seen."""
    read: Results = json.loads(RESULTS.read_text())
    return read


def table(shown: Results) -> str:
    """Return the matrix in Markdown."""
    titles = [re.sub(r"(\w+)", r"`\1`", part, count=1) for part in PARTS]
    lines = ["| kernel | " + " | ".join(titles) + " |", "|---|" + "---|" * len(PARTS)]
    for series, found in shown.items():
        cells = [
            ", ".join(
                f"**{mechanism}**" if mechanism == found[part]["chosen"] else mechanism
                for mechanism in found[part]["tested"]
            )
            for part in PARTS
        ]
        lines.append(f"| {series} (Debian's {found['release']}) | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def put_into(readme: str, shown: Results) -> str:
    """Return the README with the matrix of these results."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(shown)}{END}{after}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        shutil.copyfile(sys.argv[1], RESULTS)
    README.write_text(put_into(README.read_text(), results()))
