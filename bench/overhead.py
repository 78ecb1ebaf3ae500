"""Measure what lockd's tracing costs, beside empty programs and the tools that users would run instead.

`sudo .venv/bin/python -m bench.overhead [--quick] [--rounds N] [--variants "A;B"] [--loads A,B]` writes
bench/build/overhead.json, .md and .svg. A round runs every load under every variant, and untraced right
before or after that. A ratio is made of two such neighbours. The order of the variants changes from round to
round. Run it on an otherwise idle host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import results
from bench.chart import draw
from bench.comparison import Comparison
from bench.loads import Failed, Load, built, others, ours
from bench.variants import BY_MECHANISM, UNTRACED, VARIANTS, NotHere, Variant

ROUNDS = 4


@dataclass
class Progress:
    """Prints how far a bench is, and how many minutes are left if it goes on as fast as so far."""

    steps: int
    tells_time: bool = True
    """Whether the minutes left are printed. In an emulated machine they are useless, because its clock is
    not that of the person who waits."""
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    def say(self, what: str) -> None:
        self.done += 1
        each = (time.monotonic() - self.began) / self.done
        left = max(self.steps - self.done, 0) * each / 60
        time_left = f", {left:.1f} min left" if self.tells_time else ""
        print(f"[{self.done}/{self.steps}{time_left}] {what}", file=sys.stderr, flush=True)


def measure(
    variants: Sequence[Variant], chosen: Sequence[Load], rounds: int, tells_time: bool = True
) -> Comparison:
    """Run every load under every variant, `rounds` times.

    Variants run in pairs with an untraced run between two pairs. That run is the neighbour of the variant
    before it and of the variant after it.
    """
    found = Comparison([(load.name, load.figure, load.is_rate, load.is_free) for load in chosen])
    progress = Progress(rounds * (len(variants) + len(variants) // 2 + 1), tells_time)
    for number in range(rounds):
        turn = number % len(variants)
        order = [one for one in (*variants[turn:], *variants[:turn]) if one.name not in found.missing]
        untraced = run(chosen, found, progress, UNTRACED)
        for at, variant in enumerate(order):
            try:
                with variant.attached():
                    figures = run(chosen, found, progress, variant.name)
            except NotHere as error:
                found.missing[variant.name] = str(error)
                progress.say(f"{variant.name}: not here: {error}")
                continue
            if at % 2:
                untraced = run(chosen, found, progress, UNTRACED)
            found.add(variant.name, figures, untraced)
    return found


def run(chosen: Sequence[Load], found: Comparison, progress: Progress, name: str) -> dict[str, float]:
    """Run the loads under the variant `name`, and return the figure of each load that does not fail."""
    figures = {}
    for load in chosen:
        try:
            figures[load.name] = load.run()
        except Failed as error:
            found.failed[f"{load.name}, {name}"] = str(error)
            print(error, file=sys.stderr)
    progress.say(f"{name}: " + ", ".join(f"{load} {figure:g}" for load, figure in figures.items()))
    return figures


def beginning_so(names: str, all_of: Sequence[Load]) -> list[Load]:
    beginnings = tuple(names.split(","))
    return [one for one in all_of if one.name.startswith(beginnings)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, few runs of each load")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument(
        "--variants", help="variants, separated by semicolons; default: those for every kernel"
    )
    parser.add_argument(
        "--loads", default="", help="beginnings of load names, separated by commas; default: all"
    )
    parser.add_argument("--programs", type=Path, help="directory of the compiled bench/programs")
    parser.add_argument(
        "--runs", type=int, default=0, help="runs of each of bench/programs, of which the median is taken"
    )
    parser.add_argument("--json", type=Path, help="file for the figures; no report is written then")
    args = parser.parse_args()
    known = {one.name: one for one in (*VARIANTS, *BY_MECHANISM)}
    names = args.variants.split(";") if args.variants else [one.name for one in VARIANTS]
    if unknown := set(names) - known.keys():
        parser.error(f"no such variant: {', '.join(unknown)}; there are {'; '.join(known)}")
    variants = [known[name] for name in names]
    host = results.host()
    with tempfile.TemporaryDirectory(prefix="lockd-bench-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        if not args.programs:
            built(directory)
        runs = args.runs or (51 if args.quick else 0)
        every = beginning_so(args.loads, [*ours(args.programs or directory, runs), *others(directory)])
        chosen = [one for one in every if not one.missing()]
        for load in chosen:
            stack.enter_context(load.beside())
        rounds = args.rounds or (1 if args.quick else ROUNDS)
        found = measure(variants, chosen, rounds, not args.json)
        found.failed.update({one.name: one.missing() for one in every if one.missing()})
    if args.json:
        args.json.write_text(json.dumps({"host": host, **found.as_json()}))
    else:
        write("overhead", "What tracing costs", found, host)
    return 0


def write(name: str, title: str, found: Comparison, host: dict[str, str]) -> None:
    """Write the report and its chart."""
    text = found.markdown(title, host, f"{name}.svg")
    results.write(name, {"host": host, **found.as_json()}, text)
    draw(found, results.BUILD / f"{name}.svg")


if __name__ == "__main__":
    sys.exit(main())
