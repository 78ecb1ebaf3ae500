"""The figures of loads under each variant and in untraced runs beside it, with ratios and a report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

UNTRACED, FLOOR, LOCKD = "untraced", "floor", "lockd"
EVERY_CALL = ", every call"
"""The end of the names of variants of FLOOR and LOCKD in mode `calls` of the program futex."""
HOW = """Slower: how many times as slow as untraced, right before or after it, as the median of the
rounds (least to most). *untraced* is measured against itself in the same way: that is what chance makes of a
ratio. *every call*: in mode `calls` of the program futex. *floor*: programs that do nothing, at the hooks
that lockd chooses. ÷ floor: what is added to the load's time, divided by what the floor of the same mode
adds, or that of mode `calls` for what is not lockd's."""
RESOLUTION = 1.01
"""A smaller ratio is no cost that this bench could measure."""


@dataclass(frozen=True)
class Spread:
    """The spread of the ratios of all rounds."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, each: Sequence[float]) -> Spread:
        return cls(min(each), statistics.median(each), max(each))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f} to {self.most:.3f})"


@dataclass
class Comparison:
    """Figures of loads under variants, each with the figure of an untraced run beside it."""

    loads: Sequence[tuple[str, str, bool, bool]]
    """For each load: name, what its figure is, whether more is better, and whether it should cost nothing."""
    figures: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    """The figures by variant and load: for each round, the traced and the untraced one."""
    missing: dict[str, str] = field(default_factory=dict)
    """The reasons why variants have no figures, by the name of the variant."""
    failed: dict[str, str] = field(default_factory=dict)
    """The reasons why loads have no figure, by the name of the load, or by the names of load and variant."""

    def add(self, variant: str, traced: dict[str, float], untraced: dict[str, float]) -> None:
        """Add the figures of a round. A load that failed in one of the two runs is left out."""
        for load in traced.keys() & untraced.keys():
            pairs = self.figures.setdefault(variant, {}).setdefault(load, [])
            pairs.append((traced[load], untraced[load]))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Comparison:
        loads = [tuple(load) for load in data["loads"]]
        return cls(loads, data["figures"], data["missing"], data["failed"])

    def as_json(self) -> dict[str, Any]:
        return {
            "loads": self.loads,
            "figures": self.figures,
            "slower": {
                variant: {load: self.slower(variant, load).median for load in of_loads}
                for variant, of_loads in self.figures.items()
            },
            "missing": self.missing,
            "failed": self.failed,
        }

    def each_slower(self, variant: str, load: str) -> list[float]:
        """For each round, how many times as slow as untraced a load was; empty if it was not measured."""
        is_rate = any(is_rate for name, _, is_rate, _ in self.loads if name == load)
        pairs = self.figures.get(variant, {}).get(load, [])
        return [untraced / traced if is_rate else traced / untraced for traced, untraced in pairs]

    def slower(self, variant: str, load: str) -> Spread:
        return Spread.of(self.each_slower(variant, load))

    def over_floor(self, variant: str, load: str) -> float | None:
        """What a variant adds to the time of a load, divided by what empty programs add.

        None if chance adds as much as empty programs do, or if one of the two was not measured.
        """
        name = FLOOR if variant.startswith(LOCKD) and EVERY_CALL not in variant else FLOOR + EVERY_CALL
        if not self.each_slower(name, load) or not self.each_slower(variant, load):
            return None
        floor = self.slower(name, load).median
        return (self.slower(variant, load).median - 1) / (floor - 1) if floor > self.noise(load) else None

    def noise(self, load: str) -> float:
        """How many times as slow as another one an untraced run was at most, and not less than RESOLUTION."""
        return max([RESOLUTION, *self.each_slower(UNTRACED, load)])

    def is_free(self, variant: str, load: str) -> bool:
        """Whether no cost was measured: the median is not above what chance makes of a ratio."""
        return self.slower(variant, load).median <= self.noise(load)

    def markdown(self, title: str, host: dict[str, str], chart: str) -> str:
        """The report as Markdown, with the chart in the file `chart`."""
        return "".join(self._report(title, host, chart))

    def _report(self, title: str, host: dict[str, str], chart: str) -> Iterator[str]:
        counts = [len(each) for of_loads in self.figures.values() for each in of_loads.values()]
        facts = {**host, "rounds": max(counts, default=0)}
        yield f"# {title}\n\n"
        yield ", ".join(f"{key}: {value}" for key, value in facts.items())
        yield f".\n\n{HOW}\n\n![Slowdown by load and variant]({chart})\n"
        for load, figure, _, is_free in self.loads:
            yield f"\n## {load}\n\n| variant | {figure} | untraced beside it | slower | ÷ floor |\n"
            yield "|---|---:|---:|---:|---:|\n"
            yield from self._rows(load)
            if is_free and self.each_slower(UNTRACED, load):
                yield f"\n{self._whether_free(load)}\n"
        yield from _listed("Not measured here", self.missing.items())
        yield from _listed("Failed", self.failed.items())

    def _rows(self, load: str) -> Iterator[str]:
        for variant, of_loads in self.figures.items():
            if load not in of_loads:
                continue
            traced, untraced = (statistics.median(each) for each in zip(*of_loads[load], strict=True))
            over = None if variant.startswith((UNTRACED, FLOOR)) else self.over_floor(variant, load)
            cells = (f"{traced:,.5g}", f"{untraced:,.5g}", str(self.slower(variant, load)))
            yield f"| {variant} | {' | '.join(cells)} | {'' if over is None else f'{over:.2f}'} |\n"

    def _whether_free(self, load: str) -> str:
        own = [name for name in self.figures if name.startswith(LOCKD) and self.each_slower(name, load)]
        free = [name for name in own if self.is_free(name, load)]
        costly = [name for name in own if name not in free]
        limit = f"not above {self.noise(load):.3f}, the most that untraced runs had, or a hundredth"
        cost = f". A measurable cost: {'; '.join(costly)}" if costly else ""
        return f"No measurable cost ({limit}): {'; '.join(free) or 'none'}{cost}."


def _listed(title: str, reasons: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A list with the last line of each reason, in which errors say what they are."""
    items = [f"- {name}: {reason.strip().splitlines()[-1]}\n" for name, reason in reasons]
    if items:
        yield f"\n## {title}\n\n"
        yield from items
