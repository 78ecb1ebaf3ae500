"""Attach a program to many functions at once: by one link for all, which takes and leaves them in a moment.

Of each for itself, the kernel waits some 50 ms until nobody can be using it any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockd.errors import HostError
from lockd.load.attach import MULTI, can_attach_together
from lockd.load.bpf_object import Module
from lockd.load.hooks import Candidate

Link = tuple[Sequence[Candidate], tuple[int, int]]
"""What is attached, and the descriptors of the program and of what keeps it attached."""


def attach_together(module: Module, hooks: Iterable[Candidate]) -> list[Link]:
    """Attach those of `hooks` that are `one_of_many`, where this kernel can.

    What the kernel refuses, and what is alone, is left to be attached for itself.
    """
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for hook in hooks:
        if hook.one_of_many and hook.mechanism in MULTI:
            file = hook.hook.rpartition("+")[0] if hook.mechanism == "uprobe" else ""
            groups.setdefault((hook.function, hook.given, hook.mechanism, hook.pid, file), []).append(hook)
    links: list[Link] = []
    for group in groups.values():
        if len(group) > 1 and can_attach_together(group[0].mechanism):
            links += _attach(module, group)
    return links


def _attach(module: Module, group: Sequence[Candidate]) -> list[Link]:
    """One that is refused has all of a link refused: it is searched for by halves."""
    if len(group) < 2:
        return []
    try:
        return [(group, module.attach_together(group))]
    except HostError:
        middle = len(group) // 2
        return _attach(module, group[:middle]) + _attach(module, group[middle:])
