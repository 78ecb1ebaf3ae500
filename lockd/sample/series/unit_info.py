"""lockd_unit_info: a line for each unit that has series, with what its cgroup says, for joins of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lockd.names.labels.cgroup_paths import Unit
from lockd.sample.series.block import Block
from lockd.sample.series.limits import LineBudget
from lockd.sample.series.series import Series

FAMILY = "unit"


class UnitInfo:
    """The lines of lockd_unit_info. They never exceed their share of all lines.

    One share suits every host: a unit has a line here only if it has series, and these take dozens of lines.
    """

    def __init__(self, budget: LineBudget) -> None:
        budget.enter(FAMILY, 0)
        self._budget = budget

    def export(self, block: Block, known: Mapping[str, Unit], families: Iterable[Series]) -> int:
        """Write a line for each of the units `known` that has a series, and return how many lines these are.

        If there is no room for all, units of pods come first, then those of other containers: no local user
        can make a unit look like a pod.
        """
        units = [known[name] for name in units_of(families) & known.keys()]
        units.sort(key=lambda unit: (not unit.pod_uid, not unit.container_id, unit.name))
        del units[int(self._budget.share(FAMILY)) :]
        block.add("lockd_unit_info", units, [1] * len(units))
        return len(units)


def units_of(families: Iterable[Series]) -> set[str]:
    """The units that have series. The unit is the first label of every series."""
    return {labels[0] for series in families for labels in series.live()[1]}
