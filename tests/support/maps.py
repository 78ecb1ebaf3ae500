"""A stand-in for a map of the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Map:
    """A map of the kernel that keeps what is put into it."""

    def __init__(self, key: npt.DTypeLike, value: npt.DTypeLike) -> None:
        self.key, self.value = np.dtype(key), np.dtype(value)
        self.held: dict[bytes, npt.NDArray[Any]] = {}

    def update(self, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        self.held[keys.tobytes()] = values[0].copy()

    def delete(self, keys: npt.NDArray[Any]) -> None:
        self.held.pop(keys.tobytes(), None)
