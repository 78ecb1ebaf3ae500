"""Stacks with what was measured at each: of a trace or of the daemon, whatever they will be written as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockd.printable import printable


class KernelFrame(str):
    """A function of the kernel, among the frames of a sample."""

    __slots__ = ()


class Mark(str):
    """No function, but what is put among them: `--` between two stacks, `[stack lost]`."""

    __slots__ = ()


def kind_of(frame: str) -> str:
    """`kernel`, `mark`, or `user` for all others."""
    return "kernel" if isinstance(frame, KernelFrame) else "mark" if isinstance(frame, Mark) else "user"


@dataclass(frozen=True)
class Sample:
    """What was measured of one thread, or of all of a process, at one stack."""

    comm: str
    pid: int
    """Of the process."""
    tid: int
    frames: tuple[str, ...]
    """Outermost first, those of user space before the kernel's, which are of KernelFrame."""
    values: tuple[int, ...]
    """In the order of Profile.values."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What else is known, as the name of a lock; for formats that have room for it."""


@dataclass(frozen=True)
class Value:
    """One of the things that are measured."""

    name: str
    unit: str
    """`microseconds`, `nanoseconds` or `count`."""
    is_maximum: bool = False
    """Of samples that are put together: the largest, not the sum."""


@dataclass
class Profile:
    """Samples of one trace. The first of `values` is the one that formats with room for one show."""

    title: str
    values: tuple[Value, ...]
    samples: list[Sample] = field(default_factory=list)
    began: float = 0.0
    """Seconds since 1970."""
    seconds: float = 0.0

    def sorted(self) -> Sequence[Sample]:
        """By the first value, the smallest first, as the tools print that lockd replaces.

        Names are printable, and what was measured of one thread at stacks of the same names is one sample.
        """
        merged: dict[tuple[object, ...], Sample] = {}
        for sample in self.samples:
            shown = replace(sample, comm=printable(sample.comm), frames=tuple(map(printable, sample.frames)))
            kinds = tuple(map(kind_of, shown.frames))
            key = shown.comm, shown.pid, shown.tid, shown.frames, kinds, tuple(sorted(shown.labels.items()))
            other = merged.get(key)
            merged[key] = replace(shown, values=self._put_together(shown, other)) if other else shown
        return sorted(
            merged.values(), key=lambda sample: (sample.values[0], sample.comm, sample.frames, sample.tid)
        )

    def _put_together(self, one: Sample, other: Sample) -> tuple[int, ...]:
        pairs = zip(self.values, one.values, other.values, strict=True)
        return tuple(max(a, b) if value.is_maximum else a + b for value, a, b in pairs)
