"""What tracing costs, against nothing, against empty programs and against what users would run instead.

`sudo make bench` or `sudo .venv/bin/python bench/overhead.py [--rounds N] [--variants A,B] [--loads A,B]`
writes bench/build/overhead.json and overhead.md. Each round runs every load under every variant, one after
another; a ratio is made within its round, against the same load untraced, and the medians of the rounds are
shown. Run it on an otherwise idle host.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from loads import Load, loads
from variants import VARIANTS, NotHere, Variant

BUILD = Path(__file__).resolve().parent / "build"
UNTRACED, FLOOR = "untraced", "floor"
BAR = 30

Figures = dict[str, dict[str, list[float]]]
"""By variant and load, one figure for each round."""


def measure(
    variants: Sequence[Variant], chosen: Sequence[Load], rounds: int
) -> tuple[Figures, dict[str, str]]:
    """The figures, and why a variant has none."""
    figures: Figures = {}
    missing: dict[str, str] = {}
    for number in range(rounds):
        for variant in variants:
            if variant.name in missing:
                continue
            try:
                with variant.attached():
                    for load in chosen:
                        figure = load.run()
                        figures.setdefault(variant.name, {}).setdefault(load.name, []).append(figure)
                        print(f"{number + 1} {variant.name:<20} {load.name:<28} {figure:g}", file=sys.stderr)
            except NotHere as error:
                missing[variant.name] = str(error)
                print(f"{variant.name}: {error}", file=sys.stderr)
    return figures, missing


def ratios(figures: Figures, load: Load, variant: str) -> list[float]:
    """For each round how many times as slow as untraced."""
    traced, untraced = figures[variant][load.name], figures[UNTRACED][load.name]
    pairs = zip(traced, untraced, strict=False)
    return [before / now if load.is_rate else now / before for now, before in pairs]


def report(figures: Figures, missing: dict[str, str], chosen: Sequence[Load]) -> Iterator[str]:
    """Markdown: for each load a table with a bar for each variant."""
    yield f"# What tracing costs\n\n{platform.release()}, {os.cpu_count()} processors, "
    yield f"{len(next(iter(figures[UNTRACED].values())))} rounds, {time.strftime('%Y-%m-%d')}. "
    yield "Slower: how many times as slow as untraced in the same round, median (least to most).\n"
    for load in chosen:
        yield f"\n## {load.name}\n\n| variant | {load.figure} | slower | |\n|---|---:|---:|---|\n"
        longest = max(statistics.median(ratios(figures, load, variant)) for variant in figures)
        for variant, of_loads in figures.items():
            each = ratios(figures, load, variant)
            middle = statistics.median(each)
            bar = "█" * max(round(BAR * middle / longest), 1)
            spread = f"{middle:.3f} ({min(each):.3f} to {max(each):.3f})"
            yield f"| {variant} | {statistics.median(of_loads[load.name]):,.6g} | {spread} | {bar} |\n"
        added = _added(figures, load)
        if added:
            yield f"\n{added}\n"
    if missing:
        yield "\n## Not measured here\n\n"
        yield from (f"- {variant}: {reason.splitlines()[-1]}\n" for variant, reason in missing.items())


def _added(figures: Figures, load: Load) -> str:
    """What lockd adds, in terms of what empty programs add."""
    if load.is_rate or not {FLOOR, "lockd"} <= figures.keys():
        return ""
    rounds = zip(*(figures[name][load.name] for name in (UNTRACED, FLOOR, "lockd")), strict=False)
    each = [(lockd - untraced) / (floor - untraced) for untraced, floor, lockd in rounds if floor > untraced]
    if not each:
        return ""
    return f"Added by lockd ÷ added by empty programs: {statistics.median(each):.2f}."


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", help="names with commas between; `untraced` is always there")
    parser.add_argument("--loads", help="beginnings of names with commas between")
    args = parser.parse_args()
    wanted = {UNTRACED, *args.variants.split(",")} if args.variants else None
    variants = [one for one in VARIANTS if wanted is None or one.name in wanted]
    with tempfile.TemporaryDirectory() as directory:
        every = loads(Path(directory))
        chosen = [
            one
            for one in every
            if not one.missing() and (not args.loads or one.name.startswith(tuple(args.loads.split(","))))
        ]
        for one in every:
            if one.missing():
                print(f"{one.name}: {one.missing()}", file=sys.stderr)
        figures, missing = measure(variants, chosen, args.rounds)
    BUILD.mkdir(exist_ok=True)
    (BUILD / "overhead.json").write_text(
        json.dumps({"kernel": platform.release(), "figures": figures, "missing": missing}, indent=1)
    )
    text = "".join(report(figures, missing, chosen))
    (BUILD / "overhead.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
