"""Writes config/lockd.yaml, the commented configuration, from the descriptions in config/schema.py.

`python3 -m lockd.config.docs > config/lockd.yaml` after a change there; a test compares the two.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from lockd.config.reader import Section, described
from lockd.config.schema import Config

HEAD = """\
The configuration of lockd: every key with its default. Remove what you do not change.

Durations have units, from large to small: 1d, 1h30m, 5m, 10s, 50ms, 100us.
`lockd check --config.file=FILE` says everything that is wrong with a file. `systemctl reload lockd`
(or SIGHUP) takes changes of the keys below that say so. The others take effect at a restart; the
counters go on from there, unless what is changed is one of programs, windows, histogram, maps, or
min_block, max_block, series.max or top_locks."""
RELOADS = "Taken by a reload."


def as_yaml() -> str:
    """The whole file."""
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
            takes = about.rule.wants[0].upper() + about.rule.wants[1:]
            reload = f" {RELOADS}" if about.reloads else ""
            yield _comment(f"{about.help} {takes}.{reload}", indent)
            yield f"{indent}{name}: {about.default}\n"


def _comment(text: str, indent: str) -> str:
    lines = textwrap.wrap(text, width=98 - len(indent), break_on_hyphens=False)
    return "".join(f"{indent}# {line}\n" for line in lines)


if __name__ == "__main__":
    print(as_yaml(), end="")
