"""The text that bcc compiles: the .bpf files one after another, with what this host decides on top."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BPF_DIR = Path(__file__).resolve().parent.parent / "bpf"
HEADERS = BPF_DIR / "headers"
"""The stub kernel tree that bcc gets instead of kernel headers."""


@dataclass(frozen=True)
class Source:
    """A translation unit. bcc rewrites map operations only in its main text, hence one text."""

    text: str
    enums: dict[str, tuple[str, ...]]
    constants: dict[str, int]

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def assemble(files: Sequence[str], defines: Mapping[str, int | None]) -> Source:
    """Join `files` of lockd/bpf; a define of None is defined as empty."""
    parts = [f"#define {name} {'' if value is None else hex(value)}" for name, value in defines.items()]
    body = ""
    for name in files:
        text = (BPF_DIR / name).read_text()
        body += text
        parts += [f'#line 1 "{name}"', text]
    return Source("\n".join(parts), _enums(body), _constants(body))


def _enums(text: str) -> dict[str, tuple[str, ...]]:
    """Members of each `enum NAME { A, B };` in order; numbered from 0, as none has an initialiser."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found: dict[str, tuple[str, ...]] = {}
    for name, body in re.findall(r"\benum\s+(\w+)\s*\{([^}]*)\}\s*;", text):
        members = tuple(member.strip() for member in body.split(",") if member.strip())
        if any("=" in member for member in members):
            raise ValueError(f"enum {name} in lockd/bpf: initialisers are not supported")
        found[name] = _without_common_word(members)
    return found


def _without_common_word(members: tuple[str, ...]) -> tuple[str, ...]:
    """`pi` for KIND_PI, since all members of `enum futex_kind` begin with KIND_.

    A member without an underscore, such as the number of members at the end, is no exception to that.
    """
    words = {member.partition("_")[0] for member in members if "_" in member}
    prefix = words.pop() + "_" if len(words) == 1 else ""
    return tuple(member.removeprefix(prefix).lower() for member in members)


def _constants(text: str) -> dict[str, int]:
    """Every `#define NAME NUMBER`, except the ones that differ by architecture."""
    pairs = re.findall(r"^#define\s+(\w+)\s+\(?(-?(?:0x[0-9a-f]+|\d+))\)?\s*(?:/\*.*)?$", text, re.MULTILINE)
    return {name: int(value, 0) for name, value in pairs if not name.startswith(("NR_FUTEX", "NR_RESTART"))}
