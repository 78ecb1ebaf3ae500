"""What a trace of stacks has found, whatever it will be written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """What was measured of one thread, or of all of a process, at one stack."""

    comm: str
    pid: int
    """Of the process."""
    tid: int
    frames: tuple[str, ...]
    """Outermost first, those of user space before the kernel's; with what the tool puts between them."""
    values: tuple[int, ...]
    """In the order of Profile.values."""


@dataclass(frozen=True)
class Value:
    """One of the things that are measured."""

    name: str
    unit: str
    """`microseconds`, `nanoseconds` or `count`."""


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
        """By the first value, the smallest first, as the tools print that lockd replaces."""
        return sorted(self.samples, key=lambda sample: (sample.values[0], sample.comm, sample.frames))
