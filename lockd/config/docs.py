"""Writes config/lockd.yaml, the commented configuration, from the descriptions in lockd/config/schema.py.

Run `python3 -m lockd.config.docs > config/lockd.yaml` after each change of the schema; a test compares the
two.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from lockd.config.reader import Section, described
from lockd.config.schema import Config

HEAD = """\
The configuration of lockd: every key with its default. A key that you leave out has its default.

Durations have units, from large to small: 1d, 1h30m, 5m, 10s, 50ms, 100us.
`lockd check --config.file=FILE` reports everything that is wrong with a file.

Keys with the remark "A reload takes changes." can change while lockd runs: after `systemctl reload
lockd`, or SIGHUP. Changes of all other keys need a restart. A restart by systemd goes on with the
counters, except after a change of programs, windows, histogram, maps, filter.min_block,
filter.max_block, series.max or series.top_locks, or of a rate in profile from or to 0."""
RELOADS = "A reload takes changes."


def as_yaml() -> str:
    """The text of config/lockd.yaml."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in HEAD.splitlines())
    return head + "".join(_section(Config, 0))


def _section(kind: type[Section], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, (_, about) in described(kind).items():
        if depth == 0:
            yield "\n"
        if isinstance(about, type):
            yield f"{_comment(about.__doc__ or '', indent)}{indent}{name}:\n"
            yield from _section(about, depth + 1)
        else:
            reload = f" {RELOADS}" if about.reloads else ""
            yield _comment(f"{about.help} Value: {about.rule.wants}.{reload}", indent)
            yield f"{indent}{name}: {about.default}\n"


def _comment(text: str, indent: str) -> str:
    lines = textwrap.wrap(" ".join(text.split()), width=98 - len(indent), break_on_hyphens=False)
    return "".join(f"{indent}# {line}\n" for line in lines)


if __name__ == "__main__":
    print(as_yaml(), end="")
