"""The targets for what lockd costs, and whether a comparison of bench/overhead.py meets them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.comparison import EVERY_CALL, LOCKD, Comparison


@dataclass(frozen=True)
class Target:
    """A limit for a figure of each of `loads`.

    `measured` returns the figure of a load, and raises LookupError if it was not measured.
    """

    what: str
    limit: float
    loads: tuple[str, ...]
    measured: Callable[[Comparison, str], float]
    is_least: bool = False
    """Whether the limit is the least that is allowed, not the most."""

    def row(self, found: Comparison) -> str:
        """The row of the Markdown table: the figure of the worst load, or a note that it was not measured."""
        sign = "≥" if self.is_least else "≤"
        try:
            each = [self.measured(found, load) for load in self.loads]
        except LookupError:
            return f"| {self.what} | {sign} {self.limit:g} | not measured | |\n"
        worst = min(each) if self.is_least else max(each)
        holds = worst >= self.limit if self.is_least else worst <= self.limit
        return f"| {self.what} | {sign} {self.limit:g} | {worst:.2f} | {'yes' if holds else '**no**'} |\n"


def slower(found: Comparison, load: str, variant: str = LOCKD) -> float:
    if not found.each_slower(variant, load):
        raise LookupError
    return found.slower(variant, load).median


def over_floor(found: Comparison, load: str) -> float:
    """What lockd adds to the time of a load in mode `calls`, divided by what empty programs add.

    In the default mode nothing is attached to futex calls, so there is nothing to compare.
    """
    ratio = found.over_floor(LOCKD + EVERY_CALL, load)
    if ratio is None:
        raise LookupError
    return ratio


def over_chance(found: Comparison, load: str, variant: str = LOCKD) -> float:
    """The slowdown divided by the largest one that is chance: at most 1 if the cost could be chance."""
    return slower(found, load, variant) / found.noise(load)


TARGETS = (
    Target("futex call that does not block ÷ untraced", 1.02, ("futex wake", "futex wait"), slower),
    Target("`perf bench futex hash` rate ÷ untraced", 0.98, ("perf bench futex hash",),
           lambda found, load: 1 / slower(found, load), is_least=True),
    Target("any other system call ÷ untraced", 1.02, ("another system call",), slower),
    Target("futex ping-pong round trip ÷ untraced", 1.3, ("futex ping-pong",), slower),
    Target("pipe ping-pong round trip ÷ untraced", 1.22, ("pipe ping-pong",), slower),
    Target("`perf bench sched messaging` time ÷ untraced", 1.05, ("perf bench sched messaging",), slower),
    Target("every call: cost added to a futex call that does not block ÷ the floor's", 1.4,
           ("futex wake", "futex wait"), over_floor),
    Target("uncontended mutex in user space, all programs ÷ the most that is chance", 1.0,
           ("mutex, user space",), over_chance),
    Target("uncontended mutex in the kernel, all programs ÷ the most that is chance", 1.0,
           ("mutex, kernel (pipe)",), over_chance),
    Target("uncontended mutex in the kernel, kernel_locks ÷ the most that is chance", 1.0,
           ("mutex, kernel (pipe)",),
           lambda found, load: over_chance(found, load, f"{LOCKD}: kernel_locks")),
)  # fmt: skip


def table(found: Comparison) -> str:
    """The targets as a Markdown table. Where a row says nothing else, it is about lockd with all programs."""
    rows = "".join(target.row(found) for target in TARGETS)
    return f"| what | target | measured | holds |\n|---|---:|---:|---|\n{rows}"
