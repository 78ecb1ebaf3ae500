"""Which label sets come first, where there is not room for series of all."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Rows

HALF_LIFE = 60.0
"""Seconds after which waiting that is over counts half."""
MEMORY_NS = int(HALF_LIFE / math.log(2) * 1e9)
"""What a thread that waits all the time has by that rule in the end; no single wait counts more."""
EARNED_NS = 5_000_000
"""With less than this a label set takes nobody's place."""
STAYS = 2.0
"""So many times as much as it has, another must have waited to take its place: series shall not flap."""
FLOOR = 2
"""So many of each unit come first, so that one service does not take all."""


def ranked(
    tiers: npt.NDArray[np.int64],
    merits: npt.NDArray[np.float64],
    owners: npt.NDArray[np.int64],
    has_floor: npt.NDArray[np.bool_],
    floors: int,
) -> Rows:
    """Positions, the best first: by tier, then by merit; but before all others the first FLOOR of each owner.

    Those must have `has_floor`, and are `floors` at most: first one of each owner, then another of each.
    """
    order = np.lexsort((-merits, -tiers))
    by_owner = np.argsort(owners[order], kind="stable")
    ordered = owners[order][by_owner]
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    turn = np.empty(len(order), np.int64)
    turn[by_owner] = np.arange(len(order)) - starts
    chosen = np.flatnonzero((turn < FLOOR) & has_floor[order])
    chosen = chosen[np.argsort(turn[chosen], kind="stable")][:floors]
    is_chosen = np.zeros(len(order), np.bool_)
    is_chosen[chosen] = True
    return np.concatenate([order[chosen], order[~is_chosen]])
