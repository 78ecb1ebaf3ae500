"""Captured threads as the programs write them, made into what they are unwound from."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.names.capture import REGISTERS, Capture


def captures_of(rows: npt.NDArray[Any], machine: str = os.uname().machine) -> list[Capture]:
    """One for each struct capture of `rows`."""
    saved = rows["registers"]
    registers = np.column_stack([saved[name] for name in REGISTERS[machine]]).tolist()
    return [
        Capture(
            tuple(registers[at]),
            row["stack"].tobytes()[: int(row["bytes"])],
            tuple(address for address in row["frames"].tolist() if address),
            int(row["thread_pointer"]),
        )
        for at, row in enumerate(rows)
    ]
