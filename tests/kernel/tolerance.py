"""How far a time that lockd tells may be from the truth."""

from __future__ import annotations

from typing import Any

import pytest

SHARE = 0.03
PER_WAIT_US = 300
"""3% or 300 us a wait, whichever is more."""


def about(told_us: float, waits: float = 1) -> Any:
    """Equal to every time within tolerance of what `waits` waits took by the truth."""
    return pytest.approx(told_us, rel=SHARE, abs=PER_WAIT_US * waits)
