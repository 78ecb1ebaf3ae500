"""The labels of --by, from rows as the programs write them."""

from __future__ import annotations

import numpy as np

from lockd.trace.core.grouping import columns_of


def test_the_name_of_a_thread_ends_at_the_first_nul_and_controls_no_terminal() -> None:
    """Before Linux 5.17 (06c5088aeedd), the end of an older, longer name may stand behind the NUL."""
    stacks = [("user", "u4"), ("kernel", "u4")]
    rows = np.zeros(3, [("id", "u8"), ("comm", "S16"), ("stacks", stacks)])
    rows["comm"] = [b"ls\0h", b"ls", b"\x1b[2J"]
    rows["id"] = 7 << 32 | 8
    columns = columns_of(rows)
    assert columns["comm"] == ["ls", "ls", "?[2J"]
    assert (columns["pid"], columns["tid"]) == ([7] * 3, [8] * 3)
