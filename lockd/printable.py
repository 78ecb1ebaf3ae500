"""Makes names safe to print: any program can choose a name with characters that control a terminal, or that
break the format of a file."""

from __future__ import annotations


def masked(name: str) -> str:
    """The name with one `?` in place of each unprintable character: it stays short, as a label should be."""
    return name if name.isprintable() else "".join(c if c.isprintable() else "?" for c in name)


def printable(name: str) -> str:
    """The name with unprintable characters as escapes such as `\\x1b`, so that a reader sees what they are.

    If the type of `name` is a subclass of str, the result has this type as well.
    """
    if name.isprintable():
        return name
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    return type(name)(shown)


def host_port(host: str, port: int) -> str:
    """HOST:PORT as in a URL: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
