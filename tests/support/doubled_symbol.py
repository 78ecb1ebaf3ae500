"""A mangled name that takes forever to be read."""

from __future__ import annotations


def doubled(times: int) -> str:
    """A function with so many template arguments, each of which has the one before it twice."""
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    numbers = [""] + [digits[n] if n < 36 else digits[n // 36] + digits[n % 36] for n in range(times)]
    return "_Z1fI1AIiiE" + "".join(f"S_IS{n}_S{n}_E" for n in numbers[1:]) + "Evv"
