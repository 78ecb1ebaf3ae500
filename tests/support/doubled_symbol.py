"""A mangled name so long, once demangled, that reading it takes for ever."""

from __future__ import annotations


def doubled(times: int) -> str:
    """Return the mangled name of a function with `times` template arguments after the first one. Each has the
    argument before it twice."""
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    numbers = [""] + [digits[n] if n < 36 else digits[n // 36] + digits[n % 36] for n in range(times)]
    return "_Z1fI1AIiiE" + "".join(f"S_IS{n}_S{n}_E" for n in numbers[1:]) + "Evv"
