"""Histograms by what the user wants: the process, the thread, the stack, and what a tool adds."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockd.columns.structs import Columns
from lockd.errors import UsageError
from lockd.trace.core.histogram import Group, Histogram, Label, Linear, Scale, Tally
from lockd.trace.core.session import Session

OF_THREADS = ("comm", "pid", "tid", "stack")
"""What any value can be grouped by."""
ID_OF_CPU = 1 << 63
"""See lockd/bpf/include/group.bpf.h."""
STEPS_MOST = 1000

Row = tuple[Any, int, float | None, float | None]
"""A slot, or a text; how many values are in it, their sum and the greatest of them."""


def names(text: str) -> tuple[str, ...]:
    """The value of --by: `none`, or names with commas between, each once."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found) or len(set(found)) < len(found) or ("none" in found and len(found) > 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names with commas between, each once")
    return () if found == ("none",) else found


def linear(text: str) -> Linear:
    """The value of --linear."""
    try:
        first, last, step = (int(number, 0) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN,MAX,STEP") from None
    if step < 1 or last <= first or (last - first) % step or (last - first) // step > STEPS_MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r}: rule: MIN below MAX, and 1 to {STEPS_MOST:,} whole steps between them"
        )
    return Linear(first, last, step)


def add_options(parser: argparse.ArgumentParser, by: str, default: str = "none") -> None:
    """`by`: what there is to group by, in words."""
    parser.add_argument(
        "--by", metavar="WHAT", type=names, default=names(default),
        help=f"a histogram for each {by}; several with commas between, or none (default: {default})",
    )  # fmt: skip
    parser.add_argument(
        "--linear", metavar="MIN,MAX,STEP", type=linear,
        help="buckets of STEP values each, instead of powers of two",
    )  # fmt: skip


def defines(args: argparse.Namespace) -> dict[str, int | None]:
    """What these options mean for the programs; notes in `args` whether stacks are wanted."""
    args.wants_stacks = "stack" in args.by
    found: dict[str, int | None] = {"BY_COMM": None} if "comm" in args.by else {}
    if args.linear:
        scale: Linear = args.linear
        found |= {"LINEAR_FIRST": scale.first, "LINEAR_LAST": scale.last, "LINEAR_STEP": scale.step}
    return found


def check(args: argparse.Namespace, more: tuple[str, ...]) -> None:
    """Raise UsageError if --by has a name that is none of those of threads, nor of `more`."""
    for name in args.by:
        if name not in (*OF_THREADS, *more):
            raise UsageError(f"--by {name}: rule: {', '.join((*OF_THREADS, *more))} or none")


def columns_of(groups: Columns) -> dict[str, list[Any]]:
    """What rows of struct group (lockd/bpf/include/group.bpf.h) tell of the threads."""
    pids, tids = ids_of(groups["id"])
    comms = [comm.decode(errors="replace") for comm in groups["comm"].tolist()]
    return {"comm": comms, "pid": pids, "tid": tids, "stack": stacks_of(groups["stacks"])}


def ids_of(ids: Columns) -> tuple[list[int], list[int]]:
    """Of processes and of threads; 0 of the idle ones."""
    numbers = [0 if one & ID_OF_CPU else one for one in ids.tolist()]
    return [one >> 32 for one in numbers], [one & 0xFFFFFFFF for one in numbers]


def stacks_of(numbers: Columns) -> list[tuple[int, int]]:
    """Numbers of the user and the kernel stack, of rows of struct call_stack_ids."""
    return list(zip(numbers["user"].tolist(), numbers["kernel"].tolist(), strict=True))


class Groups:
    """What was counted so far: a histogram for each group, or a tally of texts if `scale` is None."""

    def __init__(self, by: tuple[str, ...], scale: Scale | None, session: Session) -> None:
        self._by, self._scale = by, scale
        self._stacks = session.stacks if "stack" in by else None
        self._found: dict[tuple[Any, ...], Histogram | Tally] = {}

    def add(self, columns: Mapping[str, Sequence[Any]], rows: Iterable[Row]) -> int:
        """`columns` has what each row is about, by name; returns how many values there are."""
        kinds = zip(*(columns[name] for name in self._by), strict=True) if self._by else itertools.repeat(())
        values = 0
        for kind, (slot, count, total, highest) in zip(kinds, rows, strict=bool(self._by)):
            found = self._found.get(kind)
            if found is None:
                found = self._found[kind] = Histogram(self._scale) if self._scale else Tally()
            found.add(slot, count, total, highest)
            values += count
        return values

    def result(self) -> list[Group]:
        """The largest last, where it is seen first on a terminal."""
        named: dict[tuple[Label, ...], Any] = {}
        for kind, found in self._found.items():
            # Stacks of different numbers may be of the same functions.
            labels = tuple(self._label(name, value) for name, value in zip(self._by, kind, strict=True))
            if labels in named:
                named[labels].merge(found)
            else:
                named[labels] = found
        ordered = sorted(named.items(), key=lambda item: (item[1].count, str(item[0])))
        return [Group(dict(zip(self._by, labels, strict=True)), found) for labels, found in ordered]

    def _label(self, name: str, value: Any) -> Label:
        if not self._stacks or name != "stack":
            return value  # type: ignore[no-any-return]
        user, kernel = value
        return *self._stacks.kernel(kernel), *self._stacks.user(user)
