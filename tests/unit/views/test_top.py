"""`lockd top --once` against an HTTP server that answers like the daemon: rates, kinds, order, widths."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lockd.advice import ADVICE
from tests.support.top_daemon import (
    KINDS,
    PYTHON,
    ROOT,
    SECOND,
    Daemon,
    fails,
    lock,
    serving,
    tables,
    thread,
    top,
)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving() as daemon:
        yield daemon


def test_rates_between_two_looks(daemon: Daemon) -> None:
    daemon.threads = lambda n: [
        thread(blocked_us=90 * SECOND + n * 250_000, blocked_count=500 + n * 20,
               max_blocked_us=2 * SECOND),
    ]  # fmt: skip
    daemon.locks = lambda n: [
        lock(blocked_us=90 * SECOND + n * 1_500_000, blocked_count=500 + n * 200,
             max_blocked_us=2 * SECOND, waiting=3, threads=7, holder="seller", holder_tid=12),
    ]  # fmt: skip
    done = top("--once", f"--url={daemon.url}")
    assert (done.returncode, done.stderr) == (0, "")
    header = done.stdout.splitlines()[0]
    assert header.startswith(f"lockd top  {daemon.url}  threads waiting now: 0  blocked: 250.0ms per second")
    assert header.rstrip().endswith("waits: 20.0 per second")
    shown = tables(done.stdout)
    assert shown["locks"] == [
        {
            "BLOCKED/S": "1.50s",
            "WAITS/S": "200",
            "MAX": "2.00s",
            "WAITING": "3",
            "THREADS": "7",
            "HOLDER": "seller[12]",
            "KIND": "lock",
            "LOCK": "stock_mutex",
            "SITE": "sell_one",
            "PROCESS": "shopd[10]",
            "UNIT": "shop.service",
        }
    ]
    assert shown["threads"] == [
        {
            "BLOCKED/S": "250.0ms",
            "WAITS/S": "20.0",
            "MAX": "2.00s",
            "WAITING": "-",
            "KIND": "lock",
            "THREAD": "worker[11]",
            "WAITS FOR": "stock_mutex",
            "PROCESS": "shopd[10]",
            "UNIT": "shop.service",
        }
    ]
    assert daemon.looks == {"threads": 2, "locks": 2}


def test_a_pipe_gets_it_once_without_asking(daemon: Daemon) -> None:
    daemon.threads = lambda n: [thread(blocked_count=n, blocked_us=n)]
    done = top(f"--url={daemon.url}")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert len(tables(done.stdout)["threads"]) == 1


def test_what_is_stuck_counts_while_it_lasts(daemon: Daemon) -> None:
    """A thread that waits all the time is blocked one second a second, though no wait has ended."""
    daemon.threads = lambda n: [
        thread(tid=1, blocked_us=n * 500_000, blocked_count=n),
        thread(tid=2, waiting_us=600 * SECOND + n * SECOND, lock="deadlock"),
    ]
    daemon.locks = lambda n: [
        lock("0x1", blocked_us=n * 500_000, blocked_count=n, lock="busy"),
        lock("0x2", waiting=2, lock="deadlock"),
    ]
    shown = tables(top("--once", f"--url={daemon.url}").stdout)
    assert [row["THREAD"] for row in shown["threads"]] == ["worker[2]", "worker[1]"]
    assert shown["threads"][0]["BLOCKED/S"] == "1.00s"
    assert shown["threads"][0]["MAX"] == shown["threads"][0]["WAITING"] == "10m01s"
    assert [row["LOCK"] for row in shown["locks"]] == ["deadlock", "busy"]


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ([], {"lock", "pi", "mutex"}),
        (["--kind=pi"], {"pi", "mutex"}),
        (["--kind=cond,lock"], {"cond", "lock", "mutex"}),
        (["--kind=all"], {*KINDS, "mutex", "interruptible"}),
    ],
)
def test_kinds(daemon: Daemon, flag: list[str], expected: set[str]) -> None:
    def threads(n: int) -> list[dict[str, Any]]:
        some = [thread(kind=kind, blocked_us=n, blocked_count=n) for kind in KINDS]
        some.append(thread(program="kernel_locks", kind="mutex", blocked_us=n, blocked_count=n))
        some.append(thread(program="offcpu", kind="interruptible", blocked_us=n * SECOND, blocked_count=n))
        return some

    daemon.threads = threads
    done = top("--once", f"--url={daemon.url}", *flag)
    assert {row["KIND"] for row in tables(done.stdout)["threads"]} == expected
    # The off-CPU time has the waits once more, so it is no part of the totals.
    assert f"waits: {len(expected - {'interruptible'})}.0 per second" in done.stdout


@pytest.mark.parametrize(
    ("sort", "order"),
    [("blocked", [1, 3, 2]), ("max", [2, 1, 3, 4]), ("waiting", [3, 1, 2])],
)
def test_order(daemon: Daemon, sort: str, order: list[int]) -> None:
    daemon.threads = lambda n: [
        thread(tid=1, blocked_us=n * 900_000, blocked_count=n, max_blocked_us=SECOND),
        thread(tid=2, blocked_us=n * 100_000, blocked_count=n, max_blocked_us=5 * SECOND),
        thread(tid=3, waiting_us=n * 500_000),
        thread(tid=4, blocked_us=3, blocked_count=3, max_blocked_us=3),  # nothing new
    ]
    shown = tables(top("--once", f"--url={daemon.url}", f"--sort={sort}").stdout)
    assert [row["THREAD"] for row in shown["threads"]] == [f"worker[{tid}]" for tid in order]


def test_the_code_that_held_locks(daemon: Daemon) -> None:
    def holder(site: str, seconds: float, share: float) -> dict[str, Any]:
        return {"site": site, "seconds": seconds, "share": share, "samples": seconds * 10, "stack": []}

    daemon.locks = lambda n: [
        lock("0x1", blocked_us=n * SECOND, blocked_count=n, holders=[
            holder("refill", 3.0 + 0.75 * n, 0.75), holder("count", 1.0 + 0.25 * n, 0.25)]),
        lock("0x2", blocked_us=n * SECOND, blocked_count=n, lock="unknown"),
    ]  # fmt: skip
    assert "refill 75%" in top("--once", f"--url={daemon.url}").stdout
    shown = tables(top("--once", f"--url={daemon.url}", "--by=holder").stdout)
    assert [(row["WAITED/S"], row["SHARE"], row["HOLDER"], row["LOCK"]) for row in shown["holders"]] == [
        ("750.0ms", "75%", "refill", "stock_mutex"),
        ("250.0ms", "25%", "count", "stock_mutex"),
    ]


def test_the_code_that_makes_threads_wait_in_the_end(daemon: Daemon) -> None:
    def bottleneck(n: int, holder: str, *locks: str) -> dict[str, Any]:
        links = [{"lock": one, "kind": "lock", "holder": "f"} for one in locks]
        return {
            "unit": "shop.service", "comm": "shop", "kind": "lock", "lock": locks[-1], "holder": holder,
            "cause": "disk", "seconds": n * 0.5, "share": 0.5,
            "chains": [{"seconds": 0.1, "locks": links[-1:]}, {"seconds": 0.4, "locks": links}],
        }  # fmt: skip

    daemon.bottlenecks = lambda n: [bottleneck(n, "flush", "cart", "log"), bottleneck(1, "idle", "cart")]
    shown = tables(top("--once", f"--url={daemon.url}", "--by=bottleneck").stdout)
    row, idle = shown["bottlenecks"]
    assert (idle["WAITED/S"], idle["HOLDER"]) == ("0", "idle"), "what is known of it is not forgotten"
    assert (row["WAITED/S"], row["SHARE"], row["CAUSE"], row["HOLDER"]) == ("500.0ms", "50%", "disk", "flush")
    assert (row["LOCK"], row["CHAIN"], row["UNIT"]) == ("log", "cart>log", "shop.service")
    done = top("--once", f"--url={daemon.url}", "--by=bottleneck", "--sort=held")
    assert done.returncode == 0, "bottlenecks are not about holds, whatever the mode of the daemon"


def test_how_long_kernel_locks_are_held(daemon: Daemon) -> None:
    def held(address: str, taken: int, us: float, **more: Any) -> dict[str, Any]:
        numbers = {"acquisitions": taken, "holds": taken, "held_us": us, "max_held_us": us, "holding_us": 0}
        return lock(address, program="kernel_locks", kind="mutex", tgid=0) | numbers | more

    daemon.locks = lambda n: [
        held("0x1", 10 * n, 250_000 * n, lock="busy", blocked_us=100_000 * n, blocked_count=n),
        held("0x1", 5 * n, 125_000 * n, lock="busy too", comm="other"),  # the same lock
        held("0x2", 1, 0, lock="stuck", max_held_us=9 * SECOND, holding_us=(8 + n) * SECOND),
        held("0x3", 7, 70, lock="idle"),
        lock("0x4", lock="of user space", blocked_us=n * SECOND),
    ]
    daemon.threads = lambda n: [thread(tid, blocked_us=n * tid) for tid in (1, 3, 2)]
    shown = tables(top("--once", f"--url={daemon.url}", "--sort=held").stdout)
    columns = ("LOCK", "HELD/S", "TAKEN/S", "MAX HELD", "HOLDING", "BLOCKED/S", "PROCESS")
    assert [tuple(row[column] for column in columns) for row in shown["locks"]] == [
        ("stuck", "1.00s", "0.0", "9.00s", "9.00s", "0", "shopd"),
        ("busy", "375.0ms", "15.0", "250.0ms", "-", "100.0ms", "shopd"),
    ]
    assert [row["THREAD"] for row in shown["threads"]] == ["worker[3]", "worker[2]", "worker[1]"]


def test_a_daemon_that_does_not_say_how_long_locks_are_held(daemon: Daemon) -> None:
    assert top("--once", f"--url={daemon.url}", "--sort=held").returncode == 0  # there are no locks
    daemon.locks = lambda n: [lock()]
    message = fails(f"--url={daemon.url}", "--sort=held")
    assert (
        f"{daemon.url} does not say how long locks are held: it needs programs.kernel_locks.mode" in message
    )


def test_limit(daemon: Daemon) -> None:
    daemon.threads = lambda n: [thread(tid, blocked_us=n * tid) for tid in range(1, 40)]
    daemon.locks = lambda n: [lock(hex(at), blocked_us=n * at) for at in range(1, 40)]
    shown = tables(top("--once", f"--url={daemon.url}", "--limit=3").stdout)
    assert [row["THREAD"] for row in shown["threads"]] == ["worker[39]", "worker[38]", "worker[37]"]
    assert len(shown["locks"]) == 3


def test_nothing_blocked(daemon: Daemon) -> None:
    done = top("--once", f"--url={daemon.url}")
    assert tables(done.stdout) == {"locks": [], "threads": []}


def test_names_cannot_steer_the_terminal(daemon: Daemon) -> None:
    evil = "\x1b]0;owned\x07[red]x\n\u202e"
    daemon.threads = lambda n: [thread(thread_comm=evil, lock=evil, blocked_us=n)]
    done = top("--once", f"--url={daemon.url}")
    assert "?]0;owned?[red]x??[11]" in done.stdout
    assert not set(done.stdout) & {"\x1b", "\x07", "\u202e"}


def test_an_output_that_cannot_show_every_letter(daemon: Daemon) -> None:
    daemon.threads = lambda n: [thread(thread_comm="überprüfer", blocked_us=n)]
    done = top("--once", f"--url={daemon.url}", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?berpr?fer[11]" in done.stdout


def test_what_has_to_be_known_of_a_process_is_said(daemon: Daemon) -> None:
    daemon.threads = lambda look: [
        thread(advice="java", blocked_us=look * SECOND, blocked_count=look),
        thread(12, tgid=12, advice="java", blocked_us=look * SECOND // 2, blocked_count=look),
        thread(13, comm="quiet", tgid=13, advice="go"),
        thread(
            14, comm="odd", tgid=14, advice="of a newer daemon", blocked_us=look * SECOND, blocked_count=look
        ),
    ]
    shown = top("--once", f"--url={daemon.url}").stdout
    assert f"shopd[10] and 1 more: {ADVICE['java']}" in shown
    assert ADVICE["go"] not in shown


def test_advice_takes_no_rows_without_a_terminal(daemon: Daemon) -> None:
    daemon.threads = lambda look: [
        thread(tid, advice=("java", "go")[tid % 2], blocked_us=look * tid * SECOND, blocked_count=look)
        for tid in range(1, 30)
    ]
    done = top("--once", f"--url={daemon.url}")
    assert [reason in done.stdout for reason in (ADVICE["java"][:20], ADVICE["go"][:20])] == [True, True]
    assert len(tables(done.stdout)["threads"]) == 20


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_narrow_outputs_lose_columns_and_letters_but_no_numbers(daemon: Daemon, width: int) -> None:
    name = "a-thread-with-a-very-long-name-indeed"
    daemon.threads = lambda n: [
        thread(thread_comm=name, lock=name * 3, unit=name, blocked_us=n * 123_456_000)
    ]
    done = top("--once", f"--url={daemon.url}", COLUMNS=str(width))
    assert all(len(line) <= width for line in done.stdout.splitlines())
    (row,) = tables(done.stdout)["threads"]
    assert row["BLOCKED/S"] == "2m03s"
    assert ("UNIT" in row) == (width >= 110)


def test_a_daemon_whose_numbers_stand_still(daemon: Daemon) -> None:
    daemon.time = lambda n: 1000.0
    done = top("--once", f"--url={daemon.url}")
    assert done.returncode == 1
    assert done.stderr == (
        f"lockd: error: the numbers of {daemon.url} do not change: 6 requests, 0.1s apart,"
        " returned numbers of the same time\n"
    )


def test_a_slow_daemon_is_asked_again(daemon: Daemon) -> None:
    daemon.time = lambda n: 1000.0 + n // 3
    daemon.threads = lambda n: [thread(blocked_us=n // 3 * SECOND, blocked_count=n // 3)]
    (row,) = tables(top("--once", f"--url={daemon.url}").stdout)["threads"]
    assert row["BLOCKED/S"] == "1.00s"


def test_ctrl_c_before_there_is_a_result(daemon: Daemon) -> None:
    command = [PYTHON, "-m", "lockd", "top", "--once", "--interval=1h", f"--url={daemon.url}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        deadline = time.monotonic() + 30
        while not daemon.looks["threads"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=30) == (b"", b"")
        assert child.returncode == 130
