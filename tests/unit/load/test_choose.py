"""The choice of the way in which a part of the work is done."""

from __future__ import annotations

from typing import Any

from lockd.load.choose import choose
from lockd.load.hooks import parts_of

NO_HOST: Any = None
"""A host that nobody asks anything."""


def test_a_mechanism_that_cannot_do_a_part_is_the_reason_why_it_is_not_done() -> None:
    """The reason of the part is that of its hooks, which are then not reported one by one."""
    (holds,) = (part for part in parts_of(("kernel_locks",), "all", "blocked") if part.what == "holds")
    choice = choose(holds, "tracepoint", NO_HOST)
    assert choice.way is None
    assert choice.instead_of == (
        "programs.kernel_locks.mechanism: tracepoint: its holds are measured by fentry or kprobe only"
    )
    assert {reason for _, reason in choice.hooks} == {choice.chosen.instead_of}
