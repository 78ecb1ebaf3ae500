"""`lockd top`: a live table of who is blocked most, and on what."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from rich.console import Console, Group, JustifyMethod
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from lockd.advice import ADVICE
from lockd.errors import LockdError, UsageError
from lockd.printable import masked
from lockd.views.rates import Client, Rates, Row, Table

KINDS = ("lock", "pi", "cond", "other")
BLOCKED, HELD = "blocked", "held"
PIPE_WIDTH = 500
"""Columns where the output is not a terminal: names are for grep then and stay whole."""
PIPE_ROWS = 20
MOST_ADVICE = 3
"""Lines about processes of which something has to be known."""
PATIENCE = 5
"""How many times in a row `--once` takes unchanged numbers for a daemon that is only slow."""


@dataclass(frozen=True)
class Options:
    """What the user asked to see."""

    url: str
    interval_ns: int
    once: bool
    sort: str
    kinds: frozenset[str]
    """Kinds of futex waits; with all of them, off-CPU time is shown as well."""
    limit: int | None
    insecure: bool


def options(args: argparse.Namespace) -> Options:
    """The options from parsed flags."""
    kinds = frozenset(KINDS if args.kind == "all" else args.kind.split(","))
    if not kinds <= set(KINDS):
        wants = f"{', '.join(KINDS)} with commas between, or all"
        raise UsageError(f"argument --kind: {args.kind!r} is not {wants}")
    return Options(
        url=args.url,
        interval_ns=args.interval,
        once=args.once,
        sort=args.sort,
        kinds=kinds,
        limit=args.limit,
        insecure=args.insecure,
    )


def run(options: Options) -> int:
    """Shows the tables until Ctrl-C, or once if asked to or if nobody looks at a terminal."""
    watch = Watch(options)
    terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # names in any encoding
    signal.signal(signal.SIGTERM, _terminated)  # or the terminal would stay in its other screen
    try:
        if options.once or not terminal:
            _once(watch, Console(width=None if terminal else _pipe_width(), markup=False))
        else:
            _live(watch, Console(markup=False))
    except KeyboardInterrupt:
        pass
    return 0


class Watch:
    """Looks at one daemon again and again, and keeps what it saw last."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.locks: Table | None = None
        self.threads: Table | None = None
        self._client = Client(options.url, options.insecure)
        self.url = self._client.url
        self._lock_rates, self._thread_rates = Rates(), Rates()

    def look(self) -> None:
        locks, threads = self._client.locks(), self._client.threads()
        if self.options.sort == HELD and locks.rows and not locks.has_holds:
            raise LockdError(
                f"{self.url} does not say how long locks are held: "
                "it needs programs.kernel_locks.mode: all in its configuration"
            )
        self.locks = self._lock_rates.feed(locks) or self.locks
        self.threads = self._thread_rates.feed(threads) or self.threads

    def wait(self) -> None:
        time.sleep(self.options.interval_ns / 1e9)

    def view(self, rows: int, width: int, problem: str = "") -> Group:
        """Both tables, of at most `rows` rows each, under a line with the totals."""
        if self.locks is None or self.threads is None:
            return Group(Text(f"lockd top  {self.url}  {problem or 'measuring ...'}"))
        locks = [row for row in self.locks.rows if shown(row, self.options.kinds)]
        threads = [row for row in self.threads.rows if shown(row, self.options.kinds)]
        by_hold, sort = self.options.sort == HELD, self.options.sort
        advice = _advice(self.threads.rows)
        rows = max(1, rows - (len(advice) + 1) // 2)
        return Group(
            Text(f"lockd top  {self.url}  {_totals(threads)}", no_wrap=True),
            Text(problem, style="bold red", no_wrap=True),
            *(Text(line, no_wrap=True, overflow="ellipsis") for line in advice),
            _grid("locks", HELD_COLUMNS if by_hold else LOCK_COLUMNS, self._top(locks, rows, sort), width),
            Text(""),
            _grid("threads", THREAD_COLUMNS, self._top(threads, rows, BLOCKED if by_hold else sort), width),
        )

    def _top(self, rows: Iterable[Row], most: int, sort: str) -> list[Row]:
        """The first rows in that order, without those where nothing happened."""
        if sort == HELD:
            some = (r for r in rows if r.held_rate or r.acquired_rate or r.holding_us)
        else:
            some = (r for r in rows if sort == "max" or r.blocked_rate or r.count_rate or r.waiting)
        return sorted(some, key=ORDERS[sort], reverse=True)[: self.options.limit or most]


def shown(row: Row, kinds: frozenset[str]) -> bool:
    """Whether a row belongs to what the user asked for; kernel locks always do."""
    if row.program == "futex":
        return row.kind in kinds
    return row.program == "kernel_locks" or kinds >= set(KINDS)


def _once(watch: Watch, console: Console) -> None:
    watch.look()
    for _ in range(PATIENCE):
        watch.wait()
        watch.look()
        if watch.locks and watch.threads:
            console.print(watch.view(PIPE_ROWS, console.width))
            return
    raise LockdError(
        f"the numbers of {watch.url} do not change: "
        f"{PATIENCE + 1} looks, {watch.options.interval_ns / 1e9:g}s apart, found the same time"
    )


def _live(watch: Watch, console: Console) -> None:
    watch.look()  # before the screen changes: without a daemon there is nothing to show
    with Live(console=console, screen=True, auto_refresh=False) as live:
        problem = ""
        while True:
            rows = max(1, (console.height - 8) // 2)
            live.update(watch.view(rows, console.width, problem), refresh=True)
            watch.wait()
            try:
                watch.look()
                problem = ""
            except LockdError as error:  # a restart of the daemon is no reason to stop looking
                problem = str(error).partition("\n")[0]


def duration(us: float) -> str:
    """A time for people: 850us, 12.3ms, 1.25s, 3m20s, 2h05m."""
    seconds = round(us / 1e6)
    if us < 999.5:
        return f"{us:.0f}us" if us else "0"
    if us < 999_950:
        return f"{us / 1e3:.1f}ms"
    if us < 59_995_000:
        return f"{us / 1e6:.2f}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    return f"{seconds // 3600}h{seconds // 60 % 60:02}m"


def _number(rate: float) -> str:
    return f"{rate:.1f}" if rate < 100 else f"{rate:,.0f}"


def _blocked(row: Row) -> float:
    # A lock's waits that still go on may be known only by their number; each is one second a second.
    return max(row.blocked_rate, 0 if row.waiting_us else row.waiting)


ORDERS: dict[str, Callable[[Row], tuple[float, ...]]] = {
    BLOCKED: lambda row: (_blocked(row), row.waiting_us, row.max_us),
    "max": lambda row: (row.max_us, row.blocked_rate),
    "waiting": lambda row: (row.waiting_us, row.waiting, row.blocked_rate),
    HELD: lambda row: (row.held_rate, row.holding_us, row.acquired_rate),
}


@dataclass(frozen=True)
class Column:
    """One column; it is left out on terminals narrower than `from_width`."""

    title: str
    cell: Callable[[Row], str]
    from_width: int = 0
    number: bool = False


def _process(row: Row) -> str:
    """A kernel lock's row is about all processes of one name: it has no id."""
    return f"{row.comm}[{row.tgid}]" if row.tgid else row.comm


def _waiting(row: Row) -> str:
    least = ">" if row.waiting_is_least else ""
    return f"{least}{duration(row.waiting_us)}" if row.waiting else "-"


NUMBERS = (
    Column("BLOCKED/S", lambda r: duration(r.blocked_rate * 1e6), number=True),
    Column("WAITS/S", lambda r: _number(r.count_rate), 60, number=True),
    Column("MAX", lambda r: duration(r.max_us), 50, number=True),
)
WHICH_LOCK = (
    Column("KIND", lambda r: r.kind, 70),
    Column("LOCK", lambda r: r.lock),
    Column("SITE", lambda r: r.site, 130),
    Column("PROCESS", _process, 60),
    Column("UNIT", lambda r: r.unit, 110),
)
LOCK_COLUMNS = (
    *NUMBERS,
    Column("WAITING", lambda r: str(r.waiting), number=True),
    Column("THREADS", lambda r: str(r.threads), 90, number=True),
    Column("HOLDER", lambda r: f"{r.holder}[{r.holder_tid}]" if r.holder_tid else "-", 100),
    *WHICH_LOCK,
)
HELD_COLUMNS = (
    Column("HELD/S", lambda r: duration(r.held_rate * 1e6), number=True),
    Column("TAKEN/S", lambda r: _number(r.acquired_rate), 60, number=True),
    Column("MAX HELD", lambda r: duration(r.max_held_us), 50, number=True),
    Column("HOLDING", lambda r: duration(r.holding_us) if r.holding_us else "-", number=True),
    Column("BLOCKED/S", lambda r: duration(r.blocked_rate * 1e6), 90, number=True),
    *WHICH_LOCK,
)
THREAD_COLUMNS = (
    *NUMBERS,
    Column("WAITING", _waiting, number=True),
    Column("KIND", lambda r: r.kind, 70),
    Column("THREAD", lambda r: f"{r.thread_comm}[{r.tid}]"),
    Column("WAITS FOR", lambda r: r.lock),
    Column("PROCESS", _process, 90),
    Column("UNIT", lambda r: r.unit, 110),
)


def _grid(title: str, columns: Iterable[Column], rows: list[Row], width: int) -> Group:
    columns = [column for column in columns if width >= column.from_width]
    grid = Grid(box=None, pad_edge=False)
    for column in columns:
        # Where there is not room for all, rich takes it from the columns that may wrap: the names.
        justify: JustifyMethod = "right" if column.number else "left"
        grid.add_column(column.title, justify=justify, no_wrap=column.number)
    for row in rows:
        cells = (masked(column.cell(row)) for column in columns)
        grid.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells))
    return Group(Text(title, style="bold"), grid if rows else Text("nothing blocked"))


def _advice(threads: Iterable[Row]) -> list[str]:
    """What has to be known of the processes that wait most, or can be done; a line for each."""
    advised: dict[tuple[str, str], Counter[int]] = {}
    for row in threads:
        blocked = int(_blocked(row) * 1e6)
        if row.advice in ADVICE and row.program == "futex" and blocked:
            advised.setdefault((row.advice, row.comm), Counter())[row.tgid] += blocked
    most = sorted(advised.items(), key=lambda one: one[1].total(), reverse=True)[:MOST_ADVICE]
    lines = []
    for (advice, comm), tgids in most:
        first, more = tgids.most_common(1)[0][0], len(tgids) - 1
        who = f"{masked(comm)}[{first}]" + (f" and {more} more" if more else "")
        lines.append(f"{who}: {ADVICE[advice]}")
    return lines


def _totals(threads: Iterable[Row]) -> str:
    # Off-CPU time has the futex waits in it once more.
    rows = [row for row in threads if row.program != "offcpu"]
    waiting = sum(row.waiting for row in rows)
    blocked = duration(sum(row.blocked_rate for row in rows) * 1e6)
    waits = _number(sum(row.count_rate for row in rows))
    return f"waiting now: {waiting}  blocked: {blocked} a second  waits: {waits} a second"


def _pipe_width() -> int:
    return shutil.get_terminal_size((PIPE_WIDTH, 0)).columns


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
