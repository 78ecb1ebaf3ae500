"""`lockd top`: live tables of the locks and threads with the longest waits."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
"""Columns of an output that is no terminal. Names are not cut, so that grep finds them."""
PIPE_ROWS = 20
"""Rows of each table in an output that is no terminal, unless --limit says otherwise."""
MAX_ADVICE = 3
"""Lines of advice above the tables."""
PATIENCE = 5
"""The most requests that `--once` makes after the first one, to get numbers of a later time."""


@dataclass(frozen=True)
class Options:
    """The values of the flags."""

    url: str
    interval_ns: int
    """Nanoseconds between two requests."""
    once: bool
    sort: str
    """A key of ORDERS."""
    by: str
    """What the first table shows: a key of FIRST_TABLES."""
    kinds: frozenset[str]
    """Kinds of futex waits. With all of KINDS, off-CPU time is shown as well."""
    limit: int | None
    """Rows of each table; None for as many as there is room for."""
    insecure: bool


def options(args: argparse.Namespace) -> Options:
    """The options from parsed flags. Raises UsageError for an unknown kind."""
    kinds = frozenset(KINDS if args.kind == "all" else args.kind.split(","))
    if not kinds <= set(KINDS):
        rule = f"{', '.join(KINDS)} with commas between, or all"
        raise UsageError(f"argument --kind: {args.kind!r} is not {rule}")
    return Options(
        url=args.url,
        interval_ns=args.interval,
        once=args.once,
        sort=args.sort,
        by=args.by,
        kinds=kinds,
        limit=args.limit,
        insecure=args.insecure,
    )


def run(options: Options) -> int:
    """Show the tables until Ctrl-C; only once with --once, or if the output is no terminal.

    Returns the exit code. Raises LockdError if the daemon does not answer.
    """
    watch = Watch(options)
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # names in any encoding
    signal.signal(signal.SIGTERM, _terminated)  # without it, the terminal would stay in its alternate screen
    watch.read_tables()  # before the screen changes: without a daemon there is nothing to show
    if options.once or not is_terminal:
        _show_once(watch, Console(width=None if is_terminal else _pipe_width(), markup=False))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _show_live(watch, Console(markup=False))
    return 0


class Watch:
    """The latest tables of one daemon, with rates."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.locks: Table | None = None
        self.threads: Table | None = None
        self._client = Client(options.url, options.insecure)
        self.url = self._client.url
        self._lock_rates, self._thread_rates = Rates(), Rates()

    def read_tables(self) -> None:
        """Fetch the first table and that of threads. Raises LockdError if that fails, or if --sort=held finds
        no hold times."""
        locks, threads = FIRST_TABLES[self.options.by].read(self._client), self._client.threads()
        may_have_holds = self.options.by != "bottleneck"
        if self.options.sort == HELD and locks.rows and may_have_holds and not locks.has_holds:
            raise LockdError(
                f"{self.url} does not say how long locks are held: "
                "it needs programs.kernel_locks.mode: all in its configuration"
            )
        self.locks = self._lock_rates.feed(locks) or self.locks
        self.threads = self._thread_rates.feed(threads) or self.threads

    def wait(self) -> None:
        """Sleep until the next request is due."""
        time.sleep(self.options.interval_ns / 1e9)

    @property
    def advice(self) -> list[str]:
        """The lines of advice, see _advice()."""
        return _advice(self.threads.rows) if self.threads else []

    def view(self, rows: int, width: int, problem: str = "") -> Group:
        """The totals, the message `problem`, advice, the first table and the table of threads.

        Each table has at most --limit rows, or `rows` rows without this flag.
        """
        if self.locks is None or self.threads is None:
            return Group(Text(f"lockd top  {self.url}  {problem or 'measuring ...'}"))
        locks = [row for row in self.locks.rows if is_shown(row, self.options.kinds)]
        threads = [row for row in self.threads.rows if is_shown(row, self.options.kinds)]
        by_hold, sort = self.options.sort == HELD, self.options.sort
        first = FIRST_TABLES[self.options.by]
        return Group(
            Text(f"lockd top  {self.url}  {_totals(threads)}", no_wrap=True),
            Text(problem, style="bold red", no_wrap=True),
            *(Text(line, no_wrap=True, overflow="ellipsis") for line in self.advice),
            _grid(
                first.title,
                HELD_COLUMNS if by_hold and self.options.by == "lock" else first.columns,
                self._top(locks, rows, sort),
                width,
            ),
            Text(""),
            _grid("threads", THREAD_COLUMNS, self._top(threads, rows, BLOCKED if by_hold else sort), width),
        )

    def _top(self, rows: Sequence[Row], max_rows: int, sort: str) -> list[Row]:
        """The first rows by `sort`, a key of ORDERS, without rows in which nothing happened.

        They are --limit at most, or `max_rows` without this flag.

        Rows that are known from samples are shown even if there was no new sample in the last interval,
        because their shares are those of all samples so far.
        """
        if any(row.is_sampled for row in rows):
            active: Iterable[Row] = rows
        elif sort == HELD:
            active = (r for r in rows if r.held_rate or r.acquired_rate or r.holding_us)
        else:
            active = (r for r in rows if sort == "max" or r.blocked_rate or r.count_rate or r.waiting)
        key = ORDERS[sort]
        in_order = sorted(active, key=lambda row: (key(row), row.blocked_us), reverse=True)
        return in_order[: self.options.limit or max_rows]


def is_shown(row: Row, kinds: frozenset[str]) -> bool:
    """Whether a row is shown: for a futex, if its kind is in `kinds`. Rows of kernel locks always are.

    Off-CPU time is shown only with all of KINDS.
    """
    if row.program == "futex":
        return row.kind in kinds
    return row.program == "kernel_locks" or kinds >= set(KINDS)


def _show_once(watch: Watch, console: Console) -> None:
    for _ in range(PATIENCE):
        watch.wait()
        watch.read_tables()
        if watch.locks and watch.threads:
            console.print(watch.view(PIPE_ROWS, console.width))
            return
    raise LockdError(
        f"the numbers of {watch.url} do not change: {PATIENCE + 1} requests, "
        f"{watch.options.interval_ns / 1e9:g}s apart, returned numbers of the same time"
    )


def _show_live(watch: Watch, console: Console) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        problem = ""
        while True:
            rows = max(1, (console.height - 8 - len(watch.advice)) // 2)
            live.update(watch.view(rows, console.width, problem), refresh=True)
            watch.wait()
            try:
                watch.read_tables()
                problem = ""
            except LockdError as error:  # the daemon may only be restarting
                problem = str(error).partition("\n")[0]


def duration(us: float) -> str:
    """A time in microseconds with a unit that suits its size: 850us, 12.3ms, 1.25s, 3m20s, 2h05m."""
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
    # Often only the number of a lock's ongoing waits is known. Each of them adds a second per second.
    return max(row.blocked_rate, 0 if row.waiting_us else row.waiting)


ORDERS: dict[str, Callable[[Row], tuple[float, ...]]] = {
    BLOCKED: lambda row: (_blocked(row), row.waiting_us, row.max_us),
    "max": lambda row: (row.max_us, row.blocked_rate),
    "waiting": lambda row: (row.waiting_us, row.waiting, row.blocked_rate),
    HELD: lambda row: (row.held_rate, row.holding_us, row.acquired_rate),
}
"""For each value of --sort, the function that returns the sort key of a row. The largest comes first."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    cell: Callable[[Row], str]
    from_width: int = 0
    """Narrowest output, in characters, that has this column."""
    is_number: bool = False


def _process(row: Row) -> str:
    """Name and id of a process. A kernel lock's row is about all processes of one name, and has no id."""
    return f"{row.comm}[{row.tgid}]" if row.tgid else row.comm


def _waiting(row: Row) -> str:
    least = ">" if row.waiting_is_least else ""
    return f"{least}{duration(row.waiting_us)}" if row.waiting else "-"


def _holder(row: Row) -> str:
    """The thread that held the lock when the daemon last looked, the code that made threads wait most, and
    what the threads in that code did meanwhile."""
    thread = f"{row.holder}[{row.holder_tid}]" if row.holder_tid else ""
    code = f"{row.holder_site} {row.holder_share:.0%}" if row.holder_site else ""
    did = f"({_cause(row)})" if row.holder_site and row.holder_cause else ""
    return f"{thread} {code} {did}".strip() or "-"


def _cause(row: Row) -> str:
    """What the holder of a lock did for most of the time for which it made threads wait."""
    return f"{row.holder_cause} {row.holder_cause_share:.0%}" if row.holder_cause else "-"


NUMBERS = (
    Column("BLOCKED/S", lambda r: duration(r.blocked_rate * 1e6), is_number=True),
    Column("WAITS/S", lambda r: _number(r.count_rate), 60, is_number=True),
    Column("MAX", lambda r: duration(r.max_us), 50, is_number=True),
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
    Column("WAITING", lambda r: str(r.waiting), is_number=True),
    Column("THREADS", lambda r: str(r.threads), 90, is_number=True),
    Column("HOLDER", _holder, 100),
    *WHICH_LOCK,
)
HOLDER_COLUMNS = (
    Column("WAITED/S", lambda r: duration(r.blocked_rate * 1e6), is_number=True),
    Column("SHARE", lambda r: f"{r.holder_share:.0%}", is_number=True),
    Column("SAMPLES/S", lambda r: _number(r.count_rate), 90, is_number=True),
    Column("HOLDER", lambda r: r.holder_site),
    Column("CAUSE", _cause, 80),
    Column("KIND", lambda r: r.kind, 70),
    Column("LOCK", lambda r: r.lock),
    Column("PROCESS", _process, 60),
    Column("UNIT", lambda r: r.unit, 110),
)
BOTTLENECK_COLUMNS = (
    Column("WAITED/S", lambda r: duration(r.blocked_rate * 1e6), is_number=True),
    Column("SHARE", lambda r: f"{r.holder_share:.0%}", is_number=True),
    Column("CAUSE", lambda r: r.holder_cause or "-"),
    Column("HOLDER", lambda r: r.holder_site),
    Column("LOCK", lambda r: r.lock),
    Column("CHAIN", lambda r: ">".join(r.chain), 100),
    Column("PROCESS", _process, 60),
    Column("UNIT", lambda r: r.unit, 130),
)
HELD_COLUMNS = (
    Column("HELD/S", lambda r: duration(r.held_rate * 1e6), is_number=True),
    Column("TAKEN/S", lambda r: _number(r.acquired_rate), 60, is_number=True),
    Column("MAX HELD", lambda r: duration(r.max_held_us), 50, is_number=True),
    Column("HOLDING", lambda r: duration(r.holding_us) if r.holding_us else "-", is_number=True),
    Column("BLOCKED/S", lambda r: duration(r.blocked_rate * 1e6), 90, is_number=True),
    *WHICH_LOCK,
)


@dataclass(frozen=True)
class FirstTable:
    """One of the tables that --by can put first."""

    title: str
    columns: tuple[Column, ...]
    read: Callable[[Client], Table]


FIRST_TABLES = {
    "lock": FirstTable("locks", LOCK_COLUMNS, Client.locks),
    "holder": FirstTable("holders", HOLDER_COLUMNS, Client.holders),
    "bottleneck": FirstTable("bottlenecks", BOTTLENECK_COLUMNS, Client.bottlenecks),
}
"""The tables that can come first, by the value of --by."""
THREAD_COLUMNS = (
    *NUMBERS,
    Column("WAITING", _waiting, is_number=True),
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
        # Where room is scarce, rich takes it from the columns that may wrap: those of names.
        justify: JustifyMethod = "right" if column.is_number else "left"
        grid.add_column(column.title, justify=justify, no_wrap=column.is_number)
    for row in rows:
        cells = (masked(column.cell(row)) for column in columns)
        grid.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells))
    return Group(Text(title, style="bold"), grid if rows else Text("nothing blocked"))


def _advice(threads: Iterable[Row]) -> list[str]:
    """At most MAX_ADVICE lines about the processes that wait most, one for each pair of advice and comm."""
    advised: dict[tuple[str, str], Counter[int]] = {}
    for row in threads:
        blocked = int(_blocked(row) * 1e6)
        if row.advice in ADVICE and row.program == "futex" and blocked:
            advised.setdefault((row.advice, row.comm), Counter())[row.tgid] += blocked
    worst = sorted(advised.items(), key=lambda item: item[1].total(), reverse=True)[:MAX_ADVICE]
    lines = []
    for (advice, comm), tgids in worst:
        first, more = tgids.most_common(1)[0][0], len(tgids) - 1
        processes = f"{masked(comm)}[{first}]" + (f" and {more} more" if more else "")
        lines.append(f"{processes}: {ADVICE[advice]}")
    return lines


def _totals(threads: Iterable[Row]) -> str:
    # Off-CPU time contains the futex waits, which would count twice.
    rows = [row for row in threads if row.program != "offcpu"]
    waiting = sum(row.waiting for row in rows)
    blocked = duration(sum(row.blocked_rate for row in rows) * 1e6)
    waits = _number(sum(row.count_rate for row in rows))
    return f"threads waiting now: {waiting}  blocked: {blocked} per second  waits: {waits} per second"


def _pipe_width() -> int:
    return shutil.get_terminal_size((PIPE_WIDTH, 0)).columns


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
