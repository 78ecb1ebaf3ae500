"""Names that anybody may have chosen, without what would steer a terminal or end a line."""

from __future__ import annotations


def printable(name: str) -> str:
    """The same with a `?` for each character that is none to be seen (str.isprintable)."""
    return name if name.isprintable() else "".join(c if c.isprintable() else "?" for c in name)
