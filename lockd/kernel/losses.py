"""What the programs could not count, from their counters."""

from __future__ import annotations

from lockd.kernel.manifest import Manifest
from lockd.kernel.maps import PerCpuCounters

Lost = tuple[dict[tuple[str, str], int], dict[str, int], dict[str, int], int]
"""As read() returns it."""


class Losses:
    """What the programs could not count, and what they counted without names."""

    def __init__(self, manifest: Manifest, counters: PerCpuCounters) -> None:
        self._members = manifest.enums["loss"][:-1]  # the last is their number
        self._counters = counters

    def read(self) -> Lost:
        """Dropped events by (map, reason); events counted as `other` by map; stack misses by
        reason; switch-ins that no program was called for.
        """
        counts = self._counters.read()
        dropped: dict[tuple[str, str], int] = {}
        overflowed: dict[str, int] = {}
        stacks: dict[str, int] = {}
        unseen = 0
        for member, count in zip(self._members, counts, strict=True):
            kind, _, what = member.partition("_")
            if kind == "unseen":
                unseen = int(count)
            elif kind == "over":
                overflowed[what] = int(count)
            else:
                where, _, reason = what.partition("__")
                if where == "stacks":
                    stacks[reason] = int(count)
                else:
                    dropped[where, reason] = int(count)
        return dropped, overflowed, stacks, unseen
