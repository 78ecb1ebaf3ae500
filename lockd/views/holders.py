"""The growth of the running totals of a lock's holders between two readings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

OTHER = "other"
"""The site under which the sampler adds up the holders of a lock that had to make room for others."""

Totals = tuple[int, ...]
"""The running totals of one holder: times and numbers."""


def growth(then: Mapping[str, Totals], now: Mapping[str, Totals]) -> dict[str, Totals]:
    """The growth of each holder's totals from `then` to `now`, for one lock. Keys are the sites of holders.

    The sampler keeps few holders of a lock. If one has to make room for another, its totals are added to
    OTHER, although none of them is new. But the sum over all holders only grows, so OTHER gets the part of
    this growth that no other holder has. A holder whose totals have fallen counts from zero: it had made
    room, or the sampler had forgotten the lock.
    """
    came = {}
    for site, totals in now.items():
        before = then.get(site, ())
        has_fallen = any(new < old for new, old in zip(totals, before, strict=False))
        came[site] = totals if has_fallen else _minus(totals, before)
    if came.pop(OTHER, None):
        left = _minus(_minus(_sum(now.values()), _sum(then.values())), _sum(came.values()))
        came[OTHER] = tuple(max(one, 0) for one in left)
    return came


def _sum(all_totals: Iterable[Totals]) -> Totals:
    return tuple(map(sum, zip(*all_totals, strict=True)))


def _minus(totals: Totals, less: Totals) -> Totals:
    """The totals without `less`. An empty `less` stands for zeros."""
    return tuple(new - old for new, old in zip(totals, less or (0,) * len(totals), strict=True))
