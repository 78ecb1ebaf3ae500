"""The parts of `lockd top`: rates between two looks, rows of one thread, durations in words."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockd.errors import UsageError
from lockd.printable import masked
from lockd.views.rates import MAX_ROWS, Client, Rates, Row, Table
from lockd.views.top import Options, duration, is_shown
from tests.support.top_daemon import KINDS, SECOND, Daemon, lock, serving, thread


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving() as daemon:
        yield daemon


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0"), (1, "1us"), (999, "999us"), (999.6, "1.0ms"), (1000, "1.0ms"), (999_949, "999.9ms"),
     (999_950, "1.00s"), (59.99e6, "59.99s"), (59.999e6, "1m00s"), (200e6, "3m20s"),
     (3599.7e6, "1h00m"), (7500e6, "2h05m"), (100 * 3600e6, "100h00m")],
)  # fmt: skip
def test_durations(us: float, text: str) -> None:
    assert duration(us) == text


def test_plain_names_stay() -> None:
    assert masked("Überprüfer 検査 [a]") == "Überprüfer 検査 [a]"


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "key": 1, "program": "futex", "kind": "lock", "unit": "", "comm": "", "tgid": 1,
        "lock": "", "blocked_us": 0, "count": 0, "max_us": 0, "waiting_us": 0, "waiting": 0,
    }  # fmt: skip
    return Row(**values | changes)


def fed(*looks: tuple[float, list[Row]]) -> Table | None:
    rates = Rates()
    table = None
    for time_, rows in looks:
        table = rates.feed(Table(time_, tuple(rows)))
    return table


def test_the_first_look_has_no_rates() -> None:
    assert fed((1.0, [row(count=5)])) is None


def test_rates_use_the_clock_of_the_daemon() -> None:
    table = fed((1.0, [row(count=5)]), (3.0, [row(count=9, blocked_us=SECOND)]))
    assert table is not None
    assert (table.rows[0].count_rate, table.rows[0].blocked_rate) == (2.0, 0.5)


def test_a_clock_that_is_set_changes_no_rates(daemon: Daemon) -> None:
    daemon.time, daemon.monotonic = lambda n: 1000.0 + n / 10, lambda n: 50.0 + n
    daemon.locks = lambda n: [lock(blocked_us=n * SECOND, blocked_count=4 * n)]
    client, rates = Client(daemon.url), Rates()
    assert rates.feed(client.locks()) is None
    table = rates.feed(client.locks())
    assert table is not None
    assert (table.rows[0].count_rate, table.rows[0].blocked_rate) == (4.0, 1.0)


def test_a_clock_that_went_back_costs_one_look() -> None:
    back = [(9.0, [row(count=1)]), (2.0, [row(count=3)])]
    assert fed(*back) is None
    table = fed(*back, (3.0, [row(count=4)]))
    assert table is not None and table.rows[0].count_rate == 1.0


def test_new_rows_are_all_new() -> None:
    table = fed((1.0, []), (2.0, [row(count=7)]))
    assert table is not None and table.rows[0].count_rate == 7.0


def test_rows_that_were_too_many_to_be_seen_before_are_not_new(daemon: Daemon) -> None:
    def threads(n: int) -> list[dict[str, Any]]:
        first = 1 + n * 10  # ten of them give way to others
        return [thread(tid, blocked_us=9 * SECOND) for tid in range(first, first + 1000)]

    daemon.threads = threads
    client, rates = Client(daemon.url), Rates()
    assert rates.feed(client.threads()) is None
    table = rates.feed(client.threads())
    assert table is not None and len(table.rows) == 1000
    assert {row.blocked_rate for row in table.rows} == {0.0}


def bottleneck(holder: str, share: float) -> dict[str, Any]:
    link = {"lock": "stock", "kind": "lock", "holder": "f"}
    return {
        "unit": "shop.service", "comm": "shop", "kind": "lock", "lock": "stock", "holder": holder,
        "cause": "disk", "seconds": share, "share": share, "chains": [{"seconds": share, "locks": [link]}],
    }  # fmt: skip


@pytest.mark.parametrize("more", [0, 1])
def test_a_full_table_of_bottlenecks_may_lack_some(more: int, daemon: Daemon) -> None:
    count = MAX_ROWS["bottlenecks"] - 1 + more
    daemon.bottlenecks = lambda _: [bottleneck(f"f{number}", 0.001) for number in range(count)]
    assert Client(daemon.url).bottlenecks().is_complete == (not more)


def test_shares_of_bottlenecks_of_one_name_add_up(daemon: Daemon) -> None:
    """The mutexes of many objects have one name, and each is the end of chains of its own."""
    daemon.bottlenecks = lambda _: [bottleneck("flush", 0.25), bottleneck("flush", 0.5)]
    (row,) = Client(daemon.url).bottlenecks().rows
    assert row.holder_share == 0.75


@pytest.mark.parametrize("locks", [1, MAX_ROWS["locks"]])
def test_a_holder_that_made_room_for_another_makes_no_rate(daemon: Daemon, locks: int) -> None:
    """A holder that makes room moves into `other` with all its counts, whether or not the table of locks is
    full."""

    def holder(site: str, seconds: float, samples: int) -> dict[str, Any]:
        return {"site": site, "seconds": seconds, "share": 0.1, "samples": samples, "stack": []}

    looks = [
        [holder("flush", 90.0, 900), holder("evict", 40.0, 400), holder("other", 10.0, 100)],
        [holder("flush", 90.5, 905), holder("other", 50.25, 502), holder("load", 0.125, 1)],
    ]
    many = [lock(f"{number:#x}") for number in range(locks - 1)]
    daemon.locks = lambda n: [lock("0xfff000", holders=looks[n], held_us=7 * SECOND, acquisitions=9), *many]
    client, rates = Client(daemon.url), Rates()
    assert rates.feed(client.holders()) is None
    table = rates.feed(client.holders())
    assert table is not None and table.is_complete == (locks == 1)
    assert {row.holder_site: (row.blocked_rate, row.count_rate) for row in table.rows} == {
        "flush": (0.5, 5.0), "other": (0.25, 2.0), "load": (0.125, 1.0),
    }  # fmt: skip
    assert {row.held_rate for row in table.rows} == {0.0}  # the rate of the lock, to which nothing was added


def kernel_lock(comm: str, site: str, seconds: float, count: int, **changes: Any) -> dict[str, Any]:
    about = {
        "program": "kernel_locks",
        "kind": "mutex",
        "tgid": 0,
        "site": site,
        "stack": [site][: len(site)],
    }
    waits = {"blocked_us": seconds * SECOND, "blocked_count": count}
    return lock(comm=comm, **about | waits | changes)


def looked(daemon: Daemon, read: Callable[[Client], Table], *looks: list[dict[str, Any]]) -> Table:
    """Return the table with rates after the last of these looks at locks, which are a second apart."""
    daemon.locks = lambda n: looks[n]
    client, rates = Client(daemon.url), Rates()
    *_, table = [rates.feed(read(client)) for _ in looks]
    assert table is not None
    return table


def test_an_ongoing_wait_is_no_older_after_a_restart_of_the_daemon(daemon: Daemon) -> None:
    """The tables begin anew, but the programs go on and know since when a thread waits."""
    before = lock("0x10", waiting=1, waiting_us=300 * SECOND, blocked_us=100 * SECOND, blocked_count=5)
    after = lock("0x10", waiting=1, waiting_us=301 * SECOND, blocked_us=0, blocked_count=0)
    (row,) = looked(daemon, Client.locks, [before], [after]).rows
    assert row.blocked_rate == 1.0


@pytest.mark.parametrize("before", [{"held_us": 100 * SECOND, "acquisitions": 5}, {}])
def test_an_ongoing_hold_is_no_older_after_a_restart_of_the_daemon(
    before: dict[str, Any], daemon: Daemon
) -> None:
    """The programs also know since when a thread holds a kernel lock."""
    after = {"holding_us": 301 * SECOND, "held_us": SECOND // 4, "acquisitions": 1}
    looks = ([kernel_lock("cp", "f", 1, 1, **changes)] for changes in (before, after))
    (row,) = looked(daemon, Client.locks, *looks).rows
    assert (row.held_rate, row.acquired_rate) == (1.25, 1.0)


MANY = [lock(f"{number:#x}") for number in range(MAX_ROWS["locks"])]
"""As many locks as the daemon returns at most."""


@pytest.mark.parametrize(
    ("before", "after", "rates"),
    [
        # The daemon forgets the row of a process, or of a site.
        ([("kubelet", "f", 1200, 400), ("runc", "f", 1, 30)], [("kubelet", "f", 1200.5, 405)], (0.5, 5)),
        ([("cp", "f", 1200, 400), ("cp", "g", 1, 30)], [("cp", "f", 1200.5, 405)], (0.5, 5)),
        # A site gets its name: what its row had before is not new.
        ([("cp", "f", 90, 9), ("cp", "", 7, 7)], [("cp", "f", 90, 9), ("cp", "g", 7.5, 12)], (0.5, 5)),
        ([("cp", "", 7, 7), ("cp", "", 3, 3)], [("cp", "", 7.25, 8), ("cp", "g", 3.25, 7)], (0.5, 5)),
    ],
)  # fmt: skip
def test_rates_of_a_lock_whose_rows_come_and_go(
    before: list[tuple[Any, ...]], after: list[tuple[Any, ...]], rates: tuple[float, int], daemon: Daemon
) -> None:
    looks = ([kernel_lock(*one) for one in look] for look in (before, after))
    (row,) = looked(daemon, Client.locks, *looks).rows
    assert (row.blocked_rate, row.count_rate) == rates


def test_a_row_of_a_lock_that_had_no_room_before_is_not_new(daemon: Daemon) -> None:
    first = kernel_lock("cp", "f", 1200, 40_000)
    again, entered = kernel_lock("cp", "f", 1200.5, 40_005), kernel_lock("cp", "g", 800, 10_000)
    table = looked(daemon, Client.locks, [first, *MANY[1:]], [again, entered, *MANY[2:]])
    assert [(row.blocked_rate, row.count_rate) for row in table.rows if row.tgid == 0] == [(0.5, 5.0)]


def test_a_wait_for_a_kernel_lock_counts_while_it_lasts_and_not_when_it_ends(daemon: Daemon) -> None:
    """A wait that has ended is in the row of its site."""
    waits = kernel_lock("cp", "unknown", 0, 0, stack=[], waiting=1, waiting_us=30 * SECOND)
    ended = kernel_lock("cp", "f", 30.5, 1)
    (row,) = looked(daemon, Client.locks, [waits], [ended]).rows
    assert (row.blocked_rate, row.count_rate) == (0.5, 1.0)


def test_holds_of_a_kernel_lock_that_another_row_has(daemon: Daemon) -> None:
    """Of the rows of one lock and process, the row that waited most has the holds."""
    looks = (
        [kernel_lock("cp", "f", 2, 2, held_us=70 * SECOND, acquisitions=700), kernel_lock("cp", "g", 1, 1)],
        [kernel_lock("cp", "g", 3, 3, held_us=70.5 * SECOND, acquisitions=705), kernel_lock("cp", "f", 2, 2)],
    )
    (row,) = looked(daemon, Client.locks, *looks).rows
    assert (row.held_rate, row.acquired_rate, row.blocked_rate) == (0.5, 5.0, 2.0)


def test_holders_of_a_kernel_lock_one_of_whose_rows_is_forgotten(daemon: Daemon) -> None:
    def holders(seconds: float) -> dict[str, Any]:
        one = {"site": "vfs_write", "seconds": seconds, "share": 1.0, "samples": seconds * 4, "stack": []}
        return {"holders": [one]}

    looks = (
        [kernel_lock("kubelet", "f", 9, 9, **holders(9.0)), kernel_lock("runc", "f", 5, 5, **holders(5.0))],
        [kernel_lock("kubelet", "f", 9, 9, **holders(9.5))],
    )
    (row,) = looked(daemon, Client.holders, *looks).rows
    assert (row.blocked_rate, row.count_rate) == (0.5, 2.0)


def test_a_kernel_lock_keeps_its_names_while_a_thread_waits(daemon: Daemon) -> None:
    held = {"share": 0.5, "samples": 1, "seconds": 1.0, "stack": []}
    waits = kernel_lock("cp", "unknown", 0, 0, stack=[], lock="", waiting=1, waiting_us=600 * SECOND)
    rows = [
        kernel_lock("cp", "g", 1, 1, lock="m", holders=[held | {"site": "other", "causes": {"disk": 1}}]),
        kernel_lock("cp", "f", 2, 2, lock="m", holders=[held | {"site": "vfs_read", "causes": {"cpu": 1}}]),
        kernel_lock("cp", "", 3, 3, lock="", holders=[]),
        waits,
    ]
    (row,) = looked(daemon, Client.locks, rows, rows).rows
    assert (row.lock, row.site, row.waiting_us) == ("m", "f", 600 * SECOND)
    assert (row.holder_site, row.holder_share, row.holder_cause, row.holder_cause_share) == (
        "vfs_read", 0.5, "cpu", 1.0,
    )  # fmt: skip


def test_a_kernel_lock_has_at_least_the_threads_of_each_of_its_rows(daemon: Daemon) -> None:
    """The row of a place that one thread waits at now is not the row of the crowd."""
    rows = [
        kernel_lock("cp", "f", 9, 90, threads=10),
        kernel_lock("cp", "g", 1, 1, threads=1, waiting=1, waiting_us=600 * SECOND),
    ]
    (row,) = looked(daemon, Client.locks, rows, rows).rows
    assert (row.site, row.threads) == ("g", 10)


def test_what_bottlenecks_move_to_others_is_not_new(daemon: Daemon) -> None:
    """A holder that makes room moves into `other`. Only what is new in the sum of a process makes a rate."""

    def look(**seconds: float) -> list[dict[str, Any]]:
        return [bottleneck(holder, 0.1) | {"seconds": one} for holder, one in seconds.items()]

    looks = [
        look(f1=600.0, f8=60.0),
        look(f1=600.0, other=60.0, f9=0.05),
        look(f1=600.5, other=60.25, f9=0.05),
    ]
    looks = [[*one, bottleneck("f", n) | {"comm": "else"}] for n, one in enumerate(looks, 1)]
    daemon.bottlenecks = lambda n: looks[n]
    client, rates = Client(daemon.url), Rates()
    _, moved, later = [rates.feed(client.bottlenecks()) for _ in looks]
    assert moved is not None and later is not None
    assert sum(row.blocked_rate for row in moved.rows if row.comm == "shop") == pytest.approx(0.05)
    assert [row.blocked_rate for row in later.rows] == [0.5, 0.25, 0.0, 1.0]


@pytest.mark.parametrize(
    "url",
    [
        "admin:secret@host:9776", "ftp://admin:secret@host", "http://a:secret@h:x", "http://a:secret#x@h:1",
        "http://a:secret/x@h:1", "http://a:secret?x@h:1", "http://a:x[secret@h:1", "http://a:9/secret@h:1",
        "http://a:9?secret@h:1", "http://a:9#secret@h:1", "http://a:secret@h:99999",
    ],
)  # fmt: skip
def test_no_message_has_the_password(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        Client(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["http://a:secret#x@h:1", "http://a:9/8@h:1"])
def test_a_password_that_ends_the_url_too_early_is_told_with_the_rule(url: str) -> None:
    with pytest.raises(UsageError, match=r"'http://h:1' .*; rule: .* %23 for #, %2F for /, %3F for"):
        Client(url)


def test_a_password_may_have_any_character(daemon: Daemon) -> None:
    assert Client(f"http://a:%23%2F%3F%40%25@127.0.0.1:{daemon.port}").locks().rows == ()
    ((_, authorization),) = daemon.asked
    assert b64decode(authorization.removeprefix("Basic ")) == b"a:#/?@%"


def test_lost_counts_are_all_new() -> None:
    before, after = row(count=7, blocked_us=7 * SECOND), row(count=2, blocked_us=SECOND)
    table = fed((1.0, [before]), (2.0, [after]))
    assert table is not None
    assert (table.rows[0].count_rate, table.rows[0].blocked_rate) == (2.0, 1.0)


def test_a_wait_that_a_filter_leaves_out_makes_no_rate() -> None:
    table = fed((1.0, [row(blocked_us=9 * SECOND)]), (2.0, [row(blocked_us=0)]))
    assert table is not None and table.rows[0].blocked_rate == 0.0


def test_rows_of_one_thread_are_one(daemon: Daemon) -> None:
    daemon.threads = lambda n: [
        thread(lock="first", blocked_us=5, blocked_count=1, max_blocked_us=5),
        thread(lock="now", blocked_us=2, blocked_count=2, max_blocked_us=2, waiting_us=3),
        thread(lock="else", tgid=99),
    ]
    both, other = Client(daemon.url).threads().rows
    assert (both.lock, both.blocked_us, both.count, both.max_us, both.waiting) == (
        "now",
        10,
        3,
        5,
        1,
    )
    assert other.lock == "else"


def test_nulls_are_no_names(daemon: Daemon) -> None:
    daemon.threads = lambda n: [thread(unit=None, lock=None, waiting_us=None)]
    (only,) = Client(daemon.url).threads().rows
    assert (only.unit, only.lock, only.waiting) == ("", "", 0)


def test_off_cpu_time_only_with_all_kinds() -> None:
    offcpu = row(program="offcpu", kind="interruptible")
    assert not is_shown(offcpu, frozenset({"lock", "pi", "cond"}))
    assert is_shown(offcpu, frozenset(KINDS))


def test_options_are_frozen() -> None:
    options = Options("http://h", 1, False, "max", "lock", frozenset(), None, False)
    with pytest.raises(AttributeError):
        options.sort = "blocked"  # type: ignore[misc]  # who checks types sees it too
