"""Recorded scrapes of real lockd daemons, which are replayed for as long as a bench takes.

A recording is replayed in rounds. In each round, counters continue from their values at the end of the round
before. A process that first appeared during the recording appears again in each round under a new name, and
disappears at the end of the round. The replay thus creates new series at the recorded rate.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

CUMULATIVE = ("counter", "histogram")
COMM = re.compile(r'(?<=[{,]comm=")[^"]*')
SEPARATOR = b"\f\n"
"""The separator between two scrapes in the file of a recording."""


@dataclass(frozen=True)
class Line:
    """One line of an exposition; `value` is None for a comment."""

    series: str
    value: float | None
    is_cumulative: bool = False

    @cached_property
    def comm(self) -> str:
        found = COMM.search(self.series)
        return found[0] if found else ""


@dataclass(frozen=True, eq=False)
class Recording:
    """The scrapes of one lockd, made every `step` seconds."""

    name: str
    step: int
    scrapes: Sequence[Sequence[Line]]

    @staticmethod
    def of(name: str, step: int, texts: Sequence[str]) -> Recording:
        return Recording(name, step, [list(_lines(text)) for text in texts])

    @staticmethod
    def load(path: Path) -> Recording:
        """Read a recording that store() wrote."""
        head, *texts = gzip.decompress(path.read_bytes()).split(SEPARATOR)
        return Recording.of(path.name.partition(".")[0], int(head), [text.decode() for text in texts])

    @cached_property
    def _growth(self) -> dict[str, float]:
        """The increase per round of each counter that is in the first and in the last scrape."""
        first = {line.series: line.value for line in self.scrapes[0] if line.value is not None}
        return {
            line.series: line.value - first[line.series]
            for line in self.scrapes[-1]
            if line.value is not None and line.is_cumulative and line.series in first
        }

    @cached_property
    def _stayed(self) -> set[str]:
        """The names of the processes that the first scrape has."""
        return {line.comm for line in self.scrapes[0]}

    def at(self, scrape: int) -> Iterator[tuple[str, float | None]]:
        """The series and the value of each line of a scrape. `scrape` counts from the first round on."""
        turn, place = divmod(scrape, len(self.scrapes))
        for line in self.scrapes[place]:
            if line.value is None:
                yield line.series, None
            elif line.comm in self._stayed:
                yield line.series, line.value + turn * self._growth.get(line.series, 0.0)
            else:
                yield COMM.sub(f"{line.comm}~{turn}", line.series), line.value

    @lru_cache(maxsize=64)  # noqa: B019 there are as many recordings as loads, and they stay
    def exposition(self, scrape: int) -> bytes:
        """The gzip-compressed exposition of a scrape, which is cached because many hosts answer with it."""
        lines = (series if value is None else f"{series} {value!r}" for series, value in self.at(scrape))
        return gzip.compress("\n".join([*lines, ""]).encode(), 1, mtime=0)

    def series(self) -> dict[str, tuple[float, float, bool]]:
        """The series of the last scrape: first value, last value, and whether it is cumulative."""
        first = {line.series: line.value for line in self.scrapes[0]}
        return {
            line.series: (first.get(line.series) or 0.0, line.value, line.is_cumulative)
            for line in self.scrapes[-1]
            if line.value is not None
        }

    @property
    def lines(self) -> int:
        """The number of series in the last scrape."""
        return len(self.series())

    def churn(self) -> float:
        """The number of new series per hour that come from new processes."""
        seen = {line.series for line in self.scrapes[0]}
        new = {
            line.series
            for scrape in self.scrapes
            for line in scrape
            if line.value is not None and line.comm not in self._stayed
        }
        return len(new - seen) * 3600 / (self.step * len(self.scrapes))


def store(path: Path, step: int, texts: Sequence[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(SEPARATOR.join([str(step).encode(), *texts])))


def _lines(text: str) -> Iterator[Line]:
    kind = ""
    for line in text.splitlines():
        if line.startswith("#"):
            if line.startswith("# TYPE "):
                kind = line.split()[3]
            yield Line(line, None)
        else:
            series, _, value = line.rpartition(" ")
            yield Line(series, float(value), kind in CUMULATIVE)
