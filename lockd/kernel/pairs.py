"""Pairs of maps, of which the programs write one while the other is drained: flip, wait, drain."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from lockd.columns import structs
from lockd.columns.structs import Columns
from lockd.kernel.batch import MISSING, can_batch
from lockd.kernel.manifest import Manifest
from lockd.kernel.maps import Buffers, Control, GracePeriod, HashMap, PerCpuCounters

log = logging.getLogger(__name__)

Entries = tuple[Columns, Columns]
"""Keys and values."""


class Pairs:
    """The maps of `manifest`, whose descriptors come first in `fds`.

    `others` are maps that are neither hash maps nor the programs' common ones.
    """

    def __init__(self, manifest: Manifest, fds: list[int], others: tuple[str, ...] = ()) -> None:
        infos = {info.name: (fd, info) for fd, info in zip(fds, manifest.maps, strict=False)}
        batch = can_batch(infos["threads"][0])
        if not batch:
            log.warning("%s", MISSING)
        self.hashes = {
            name: HashMap(fd, info, batch)
            for name, (fd, info) in infos.items()
            if name not in ("control", "losses", "run_times", *others)
        }
        """Every hash map by name, those of pairs as NAME_0 and NAME_1."""
        self.pairs = {
            name.removesuffix("_0"): (one, self.hashes[name.removesuffix("_0") + "_1"])
            for name, one in self.hashes.items()
            if name.endswith("_0")
        }
        self.losses = PerCpuCounters(*infos["losses"])
        self.run_times = PerCpuCounters(*infos["run_times"])
        self.buffers = Buffers(list(self.hashes.values()))
        fd, info = infos["control"]
        self.control = Control(fd, info.value)  # type: ignore[arg-type]  # a layout, as numpy.dtype() takes it
        self._grace = GracePeriod()
        self._grace.begin()  # a sampler that ended may have flipped a moment ago

    @property
    def is_settled(self) -> bool:
        """Whether no program can still be writing to the maps that are idle."""
        return self._grace.over

    def idle(self, name: str) -> HashMap:
        """The map of a pair that the programs do not write to."""
        return self.pairs[name][1 - self.control.window]

    def drain(self) -> Iterator[tuple[str, Entries]]:
        """Empty the idle map of each pair; what was in it, even if that is nothing."""
        for name in self.pairs:
            yield name, self.drain_one(name)

    def drain_one(self, name: str) -> Entries:
        """Empty the idle map of one pair."""
        keys, values = self.idle(name).drain(self.buffers)
        return (structs.copy(keys), structs.copy(values)) if len(keys) else (keys, values)

    def flip(self, is_timed: bool = False) -> None:
        """Let the programs write to the other maps, and take their run times if `is_timed`."""
        self.control.flip(is_timed)
        self._grace.begin()
