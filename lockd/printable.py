"""Names that any program may have chosen, without what would change a terminal, a line or a file."""

from __future__ import annotations


def masked(name: str) -> str:
    """The name with a `?` for each character that cannot be shown: short, as labels are."""
    return name if name.isprintable() else "".join(c if c.isprintable() else "?" for c in name)


def printable(name: str) -> str:
    """The name with such characters as `\\x1b`: for whoever reads it to find out what it is."""
    if name.isprintable():
        return name
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    return type(name)(shown)
