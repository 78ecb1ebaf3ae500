"""The kernels lockd is tested on: the one list that continuous integration, README and skips come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """A release series, and the suite of Debian whose newest package of it is tested."""

    series: str
    suite: str


KERNELS = (
    Kernel("5.10", "bullseye-security"),
    Kernel("6.1", "bookworm-security"),
    Kernel("6.12", "bookworm-security"),
    Kernel("7.2", "sid"),
)


def kernel_of(series: str) -> Kernel:
    """The kernel of that series. Raises ValueError."""
    for kernel in KERNELS:
        if kernel.series == series:
            return kernel
    known = ", ".join(kernel.series for kernel in KERNELS)
    raise ValueError(f"{series}: not a tested kernel; there are {known}")
