"""The daemon's profiles over HTTP: /debug/pprof for go tool pprof, /flamegraph for people."""

from __future__ import annotations

import array
import asyncio
import base64
import hashlib
import os
import random
import re
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lockd.export.detail import VALUES, LockSample, ProfileQuery, between, locks_left_out, profile_of
from lockd.export.handlers import Service
from lockd.export.web_config import WebConfig
from lockd.messages import REQUEST_DETAIL, REQUEST_METRICS, REQUEST_WAITS, pack
from lockd.sample.aggregates.lock_holders import MOST_HOLDERS, HoldersOfLock
from lockd.sample.locks.releases import Release
from lockd.views.profile import Profile
from tests.needs import need
from tests.support.exporter_process import Exporter, exporter, full_block, waits_block

EVIL = "</svg><script>alert(1)</script>"
LOCKS = [
    # Program, comm, kind, lock, stack (innermost first), blocked us, waiting us, waits.
    ("futex", "shop", "lock", "shop:stock", ["pthread_mutex_lock", "shop:sell", "shop:main"], 3000.0, 0.0, 3),
    ("futex", "shop", "lock", "shop:stock", ["pthread_mutex_lock", "shop:buy", "shop:main"], 1000.0, 5e6, 1),
    ("futex", "idle", "cond", "idle:queue", ["pthread_cond_wait", "idle:main"], 9e6, 0.0, 3),
    ("futex", EVIL, "pi", "", [], 10.0, 0.0, 1),
    ("kernel_locks", "cp", "rwsem_write", "inode->i_rwsem", ["down_write", "do_truncate"], 700.0, 0.0, 7),
]
HOLDERS = [
    {
        "site": "shop:refill",
        "seconds": 0.003,
        "share": 0.75,
        "samples": 3,
        "stack": ["unlock", "shop:refill"],
    },
    {"site": "(no release)", "seconds": 0.001, "share": 0.25, "samples": 1, "stack": []},
]
"""The holders of the first lock in LOCKS."""
KERNEL_HOLDERS = [
    {"site": "vfs_write", "seconds": 0.002, "share": 1.0, "samples": 2, "stack": ["up_write", "vfs_write"]}
]
"""The holders of the last lock in LOCKS."""


def block(later: float = 0.0, more: int = 0, clock_set: float = 0.0) -> bytes:
    """Return the sampler's block of details, `later` seconds after the first one.

    Each row has `more` further waits of 100 us. `clock_set`: seconds by which the wall clock was set.
    """
    held = [
        {**one, "seconds": one["seconds"] + more * 1e-4, "samples": one["samples"] + more}  # type: ignore[operator]
        for one in HOLDERS
    ]
    program, comm, kind, lock, stack, *rest = zip(*LOCKS, strict=True)
    n = len(LOCKS)
    text = {
        "program": program, "comm": comm, "kind": kind, "unit": ["shop.service"] * n, "lock": lock,
        "site": ["app:site"] * n, "address": [f"{0x1000 * (1 + row):#x}" for row in range(n)],
    }  # fmt: skip
    numbers = dict(zip(("blocked_us", "waiting_us", "blocked_count"), rest, strict=True))
    numbers["tgid"] = [10] * n
    table = {
        "is_cut": False,
        "text": {column: list(values) for column, values in text.items()},
        "numbers": list(numbers),
        "lists": {"stack": list(stack), "holders": [held, *[[]] * (n - 2), KERNEL_HOLDERS]},
    }
    columns: dict[str, Any] = {"locks.key": array.array("q", range(n))}
    columns["locks.since"] = array.array("d", [1.5] * n)
    for column, values in numbers.items():
        add = {"blocked_us": 100.0 * more, "blocked_count": more}.get(column, 0)
        kind_of = "d" if column.endswith("_us") else "q"
        columns[f"locks.{column}"] = array.array(kind_of, [value + add for value in values])
    head = {
        "tables": {"locks": table},
        "time": 1700000000.0 + later + clock_set,
        "monotonic": 500.0 + later,
    }
    return pack(head, columns)


@pytest.fixture
def running() -> Iterator[Exporter]:
    blocks = {REQUEST_METRICS: full_block(), REQUEST_DETAIL: block(), REQUEST_WAITS: waits_block()}
    with exporter(blocks=blocks) as one:
        yield one


def go_pprof(running: Exporter, path: str, *how: str) -> str:
    go = need("go")
    url = f"http://127.0.0.1:{running.port}{path}"
    command = [go, "tool", "pprof", "-nodefraction=0", *how, url]
    with tempfile.TemporaryDirectory() as kept:  # go keeps what it fetches there
        environment = {**os.environ, "PPROF_TMPDIR": kept}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout


def rows(top: str) -> dict[str, list[str]]:
    """Return the columns of `go tool pprof -top` by name: flat, flat%, sum%, cum and cum%."""
    lines = [line.split(maxsplit=5) for line in top.splitlines() if re.match(r"\s+\S+\s+[\d.]+%", line)]
    return {fields[5]: fields[:5] for fields in lines}


def test_go_reads_the_profile_of_locks(running: Exporter) -> None:
    found = rows(go_pprof(running, "/debug/pprof/futex", "-top", "-unit=us"))
    assert (found["shop:stock"][0], found["shop:sell"][3], found["shop:buy"][3]) == (
        "4000us",
        "3000us",
        "1000us",
    )
    assert (found["shop"][0], found["shop"][3]) == ("0", "4000us")  # the process is the outermost frame
    assert found["0x4000"][0] == "10us"
    assert "idle:queue" not in found
    waits = rows(go_pprof(running, "/debug/pprof/futex", "-top", "-sample_index=waits"))
    assert waits["shop:stock"][0] == "4"
    waiting = go_pprof(running, "/debug/pprof/futex", "-top", "-sample_index=waiting", "-unit=us")
    assert rows(waiting)["shop:stock"][0] == "5000000us"


def test_the_code_that_held_a_lock_by_the_time_that_others_waited(running: Exporter) -> None:
    found = rows(go_pprof(running, "/debug/pprof/holders", "-top", "-unit=us", "-sample_index=waited"))
    assert (found["shop:refill"][3], found["(no release)"][3]) == ("3000us", "1000us")
    assert found["shop:stock"][0] == "4000us"
    samples = rows(go_pprof(running, "/debug/pprof/holders", "-top", "-sample_index=samples"))
    assert (samples["shop:refill"][3], samples["(no release)"][3]) == ("3", "1")
    page = frames(running.ask("/flamegraph?program=futex&by=holder")[2])
    assert page["shop:refill"] == "3.000 ms, 75.00%"
    assert "vfs_write" not in page
    assert "shop:sell" in frames(running.ask("/flamegraph?program=futex&by=waiter")[2])


def test_the_code_that_held_a_lock_of_the_kernel(running: Exporter) -> None:
    found = rows(go_pprof(running, "/debug/pprof/holders", "-top", "-unit=us", "-sample_index=waited"))
    assert found["inode->i_rwsem"][0] == found["vfs_write"][3] == "2000us"
    assert found["shop:stock"][0] == "4000us"
    path = "/debug/pprof/holders?program=kernel_locks"
    assert "shop:stock" not in rows(go_pprof(running, path, "-top", "-sample_index=waited"))
    page = frames(running.ask("/flamegraph?program=kernel_locks&by=holder")[2])
    assert page["vfs_write"] == page["up_write"] == "2.000 ms, 100.00%"
    assert "shop:refill" not in page


def test_holders_of_some_seconds(running: Exporter) -> None:
    running.sampler.later[REQUEST_DETAIL] = block(later=1.0, more=5)
    page = frames(running.ask("/flamegraph?program=futex&by=holder&seconds=1")[2])
    assert page["shop:refill"] == "500 us, 50.00%"


def test_filters(running: Exporter) -> None:
    assert "idle:queue" in rows(go_pprof(running, "/debug/pprof/futex?kind=cond", "-top"))
    only = rows(go_pprof(running, "/debug/pprof/futex?comm=shop&unit=shop.service", "-top"))
    assert {"shop", "shop:stock"} <= set(only)
    assert "0x4000" not in only


@pytest.mark.parametrize(
    ("profile", "counted"),
    [("futex", "waits"), ("kernel_locks", "waits"), ("offcpu", "samples"), ("wakers", "samples")],
)
def test_servers_get_what_they_make_the_type_of_a_profile_of(
    running: Exporter, profile: str, counted: str
) -> None:
    raw = go_pprof(running, f"/debug/pprof/{profile}", "-raw")
    assert f"blocked/nanoseconds[dflt] waiting/nanoseconds {counted}/count" in raw
    assert f"PeriodType: {counted} count\nPeriod: 1\n" in raw
    assert "Duration:" not in raw  # without it, servers take the profile for a total
    assert "Time: 2023-11-14" in raw


def test_kernel_locks(running: Exporter) -> None:
    raw = go_pprof(running, "/debug/pprof/kernel_locks", "-raw")
    assert re.search(r"M=2 down_write", raw)
    assert "unit:[shop.service]" in raw
    found = rows(go_pprof(running, "/debug/pprof/kernel_locks", "-top", "-unit=us"))
    assert found["inode->i_rwsem"][0] == "700us"


def test_waits_off_the_cpu(running: Exporter) -> None:
    """The 600 us of `disk` are divided between its two stacks in proportion to their weights."""
    found = rows(go_pprof(running, "/debug/pprof/offcpu", "-top", "-unit=us"))
    assert (found["sleep"][0], found["disk"][0], found["poll"][0]) == ("4000us", "600us", "90us")
    assert (found["shop"][3], found["main"][3], found["load"][3]) == ("4600us", "4600us", "400us")
    assert found["[not sampled]"][3] == "90us"
    samples = rows(go_pprof(running, "/debug/pprof/offcpu", "-top", "-sample_index=samples"))
    assert (samples["sleep"][0], samples["disk"][0], samples["nanosleep"][3]) == ("2", "4", "2")
    waiting = rows(go_pprof(running, "/debug/pprof/offcpu", "-top", "-sample_index=waiting", "-unit=ms"))
    assert waiting["sleep"][0] == waiting["[waits now]"][3] == "10000ms"
    raw = go_pprof(running, "/debug/pprof/offcpu?unit=shop.service&kind=disk", "-raw")
    assert re.search(r"M=2 vfs_read", raw)
    assert re.search(r"M=1 load", raw)
    assert "kind:[disk]" in raw
    assert not re.search("sleep|waker|notify", raw)


def test_who_ended_the_waits_off_the_cpu(running: Exporter) -> None:
    found = rows(go_pprof(running, "/debug/pprof/wakers", "-top", "-unit=us"))
    assert (found["irq"][0], found["kswapd0"][0]) == ("4000us", "400us")
    assert found["notify"][3] == found["wake_up"][3] == "600us"
    raw = go_pprof(running, "/debug/pprof/wakers?comm=shop", "-raw")
    assert {"irq", "kswapd0", "shop"} == set(re.findall(r"waker:\[(.*?)\]", raw))
    page = frames(running.ask("/flamegraph?program=offcpu&by=waker&kind=disk")[2])
    assert page["kswapd0"] == "400 us, 66.67%"
    assert "sleep" not in page
    assert "kswapd0" not in frames(running.ask("/flamegraph?program=offcpu&by=waiter")[2])


@pytest.mark.parametrize(("path", "shown"), [("offcpu", "1000us"), ("wakers?unit=db.service", "500us")])
def test_waits_off_the_cpu_of_some_seconds(running: Exporter, path: str, shown: str) -> None:
    """Each group gets 5 waits of 100 us. Those of `disk` are sampled at one stack, the others are not."""
    running.sampler.later[REQUEST_WAITS] = waits_block(later=1.0, more=5, clock_set=-3600.0)
    path = f"/debug/pprof/{path}{'&' if '?' in path else '?'}seconds=1"
    top = go_pprof(running, path, "-top", "-unit=us")
    assert running.sampler.requests == [REQUEST_WAITS] * 2
    assert "Duration: 1s" in top
    assert rows(top)["[not sampled]"][3] == shown
    assert "load" not in rows(top)


def test_a_profile_of_some_seconds_is_what_came_to_it(running: Exporter) -> None:
    running.sampler.later[REQUEST_DETAIL] = block(later=2.0, more=5)
    began = time.monotonic()
    top = go_pprof(running, "/debug/pprof/futex?seconds=2", "-top", "-unit=us")
    assert time.monotonic() - began >= 2
    assert rows(top)["shop:stock"][0] == "1000us"  # 5 waits of 100 us at each of its two stacks
    assert "Duration: 2s" in top


def of_mutexes(*rows: tuple[int, int]) -> Profile:
    """Return a profile of mutexes with one name and stack. A row is an address and the blocked us."""
    about = "shop", 10, 0, ("main", "lock")
    samples = [LockSample(*about, (us, 0, 1), {}, address) for address, us in rows]
    return Profile("test", VALUES, list(samples), 0.0)


def test_what_came_to_locks_of_one_name() -> None:
    """The mutexes of many objects have one name: the earlier waits for one must not count for another."""
    earlier = of_mutexes((0x1000, 100), (0x2000, 1))
    assert between(earlier, of_mutexes((0x1000, 100), (0x2000, 1)), 1.0).samples == []
    (sample,) = between(earlier, of_mutexes((0x1000, 100), (0x2000, 8)), 1.0).samples
    assert sample.values == (7, 0, 0)


def test_a_row_that_may_have_been_left_out_before_is_not_new() -> None:
    """If the table does not show all locks, a lock can enter it with the time of all earlier waits for it."""
    earlier, later = of_mutexes((0x1000, 100)), of_mutexes((0x1000, 100), (0x2000, 12_000))
    assert [one.values for one in between(earlier, later, 1.0).samples] == [(12_000, 0, 1)]
    assert between(earlier, later, 1.0, left_out={0x2000}).samples == []


@pytest.mark.parametrize(("is_cut", "left_out"), [(True, {3, -4}), (False, set())])
def test_a_row_that_was_made_after_a_cut_table_is_new(is_cut: bool, left_out: set[int]) -> None:
    """Rows 1 and 2 were shown, the rows 3 and -4 were there already, and the others were made after that."""
    arrays = {"locks.key": memoryview(array.array("q", [1, 2]))}
    earlier = {"tables": {"locks": {"is_cut": is_cut}}, "monotonic": 500.0}, arrays
    now = {
        "locks.key": memoryview(array.array("q", [2, 3, -4, 5, -6])),
        "locks.since": memoryview(array.array("d", [7.0, 499.5, 500.0, 500.5, 501.0])),
    }
    assert locks_left_out(earlier, ({}, now)) == left_out


@pytest.mark.parametrize("by", ["waiter", "holder"])
@pytest.mark.parametrize("named", ["f", ""])
def test_what_came_to_places_of_one_name(by: str, named: str) -> None:
    """Two places in one function must not be mixed up: they have the same callers, and at first no name."""

    def profile(name: str, *waited_s: float) -> Profile:
        about = {"program": "kernel_locks", "unit": "", "comm": "cp", "kind": "mutex", "address": "0x1000"}
        text = {column: [value] * 2 for column, value in (about | {"lock": name, "site": name}).items()}
        holders = [[{"site": "g", "seconds": s, "samples": 1, "stack": []}] for s in waited_s]
        numbers = {name: array.array("q", [0, 0]) for name in ("tgid", "waiting_us", "blocked_count")}
        numbers["blocked_us"] = array.array("q", [round(s * 1e6) for s in waited_s])
        lists = {"stack": [[name] if name else []] * 2, "holders": holders}
        head = {"tables": {"locks": {"text": text, "numbers": list(numbers), "lists": lists}}, "time": 0.0}
        arrays = {f"locks.{name}": memoryview(values) for name, values in numbers.items()}
        arrays["locks.key"] = memoryview(array.array("q", [7, -8]))
        return profile_of(ProfileQuery("kernel_locks", {"by": [by.encode()]}), head, arrays)

    (came,) = between(profile(named, 100.0, 1.0), profile("f", 100.5, 1.0), 1.0).samples
    assert came.values[0] == 500_000


class Contended:
    """A lock with its holders, as the sampler keeps them in a row of its table."""

    def __init__(self) -> None:
        self.holders = HoldersOfLock()

    def release(self, site: str, us: int) -> None:
        """Add a sample of a release by the code at `site`, for which others have waited `us` microseconds."""
        self.holders.add(
            Release(
                10, ("shop.service", "shop"), 0x1000, 0, False, us * 1000, 0.0, 0,
                causes={"running": us * 1000}, holder=site, stack=(site, "main"),
            )
        )  # fmt: skip

    def profile(self) -> Profile:
        text = {"program": "futex", "unit": "", "comm": "shop", "kind": "lock", "lock": "m", "site": ""}
        lists = {"address": ["0x1000"], "stack": [[]], "holders": [self.holders.rows()]}
        columns = {**{name: [value] for name, value in text.items()}, **lists}
        table = {"text": columns, "numbers": ["tgid"], "lists": {}}
        head = {"tables": {"locks": table}, "time": 0.0}
        return profile_of(
            ProfileQuery("futex", {"by": [b"holder"]}),
            head,
            {name: memoryview(array.array("q", [10])) for name in ("locks.key", "locks.tgid")},
        )


def of_sites(profile: Profile) -> dict[str, tuple[int, ...]]:
    return {sample.labels["holder"]: sample.values for sample in profile.samples}


def test_a_holder_that_made_room_for_another_is_nothing_new() -> None:
    """A holder that loses its place is added to `other`, with all that it ever had. That is no growth.

    The holder that gets the place was in `other` before.
    """
    lock = Contended()
    for number in range(MOST_HOLDERS):
        lock.release(f"f{number}", 1000 + number)
    before = lock.profile()
    lock.release("late", 70)
    lock.release("f5", 30)
    later = lock.profile()
    assert of_sites(between(before, later, 1.0)) == {"other": (70, 1), "f5": (30, 1)}
    lock.release("late", 2000)  # takes the place of `f0`
    lock.release("f0", 5)
    latest = lock.profile()
    assert of_sites(latest)["other"] == (70 + 1000 + 5, 3)
    assert of_sites(between(later, latest, 1.0)) == {"late": (2000, 1), "other": (5, 1)}


def test_what_came_to_holders_is_neither_more_nor_less_than_what_was_sampled() -> None:
    chance, lock = random.Random(2), Contended()
    lock.release("f0", 10)
    before = lock.profile()
    for _ in range(300):
        times = [chance.randrange(1, 1000) for _ in range(chance.randrange(6))]
        for us in times:
            lock.release(f"f{chance.randrange(20)}", us)
        later = lock.profile()
        came = of_sites(between(before, later, 1.0)).values()
        assert (sum(us for us, _ in came), sum(count for _, count in came)) == (sum(times), len(times))
        assert min((min(values) for values in came), default=0) >= 0
        before = later


@pytest.mark.parametrize(("program", "samples"), [("futex", 1), ("kernel_locks", 0)])
def test_what_nothing_came_to_is_left_out(running: Exporter, program: str, samples: int) -> None:
    """In the profile of `futex`, one sample stays: that of the wait that goes on."""
    running.sampler.later[REQUEST_DETAIL] = block(later=1.0)
    raw = go_pprof(running, f"/debug/pprof/{program}?seconds=1", "-raw")
    assert "Duration: 1s" in raw
    assert len(re.findall(r"^ +\d+ +\d+ +\d+: ", raw, re.MULTILINE)) == samples


@pytest.mark.parametrize("clock_set", [-3600.0, 3600.0])
def test_a_clock_that_is_set_meanwhile_does_not_matter(running: Exporter, clock_set: float) -> None:
    running.sampler.later[REQUEST_DETAIL] = block(later=2.0, more=5, clock_set=clock_set)
    raw = go_pprof(running, "/debug/pprof/futex?seconds=1", "-raw")
    assert "Duration: 2s" in raw
    samples = re.findall(r"^ +(-?\d+) +(-?\d+) +(-?\d+): ", raw, re.MULTILINE)
    assert len(samples) == 3
    # The wait has gone on for 5 s, and counts with the 2 s between the two blocks.
    assert max(int(waiting) for _, waiting, _ in samples) == 2_000_000_000
    assert min(int(value) for sample in samples for value in sample) >= 0


SVG = "{http://www.w3.org/2000/svg}"


def frames(body: bytes) -> dict[str, str]:
    """Return what a flame graph tells about each frame, by the name of the frame."""
    text = body.decode()
    svg = ET.fromstring(text[text.index("<svg") : text.index("</svg>\n") + 6])
    titles = [group.findtext(f"{SVG}title") or "" for group in svg.findall(f"{SVG}g[@id='frames']/{SVG}g")]
    return dict(title.split("\n") for title in titles)


def test_the_flame_graph(running: Exporter) -> None:
    status, headers, body = running.ask("/flamegraph?program=futex")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    found = frames(body)
    assert found["shop:sell"] == "3.000 ms, 0.06%"
    assert found["shop:buy"] == "5.001 s, 99.94%"  # 5 s of a wait that goes on, and 1 ms that ended
    kernel = frames(running.ask("/flamegraph?program=kernel_locks")[2])
    assert {"cp", "do_truncate", "down_write", "inode->i_rwsem"} <= set(kernel)
    waits = frames(running.ask("/flamegraph?program=offcpu")[2])
    assert waits["[waits now]"] == "10.000 s, 99.95%"
    waits = frames(running.ask("/flamegraph?program=offcpu&kind=disk")[2])
    assert waits["load"] == "400 us, 66.67%"


def test_names_are_text_and_only_our_own_script_may_run(running: Exporter) -> None:
    _, headers, body = running.ask("/flamegraph?program=futex&kind=pi")
    assert EVIL in frames(body)
    text = body.decode()
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    for element in ("script", "style"):
        (content,) = re.findall(rf"<{element}><!\[CDATA\[(.*?)\]\]></{element}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy


def test_the_script_and_the_style_are_allowed_by_a_browser(running: Exporter, tmp_path: Path) -> None:
    browser = need("chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user"]
    command += ["--window-size=777,600", "--enable-logging=stderr", "--dump-dom"]
    url = f"http://127.0.0.1:{running.port}/flamegraph?program=futex"
    done = subprocess.run([*command, url], capture_output=True, text=True, check=True, timeout=120)
    width = re.search(r'<svg class="flamegraph"[^>]* width="(\d+)"', done.stdout)
    assert width
    assert int(width[1]) < 800  # the script has fitted it to the window
    assert "Content Security Policy" not in done.stderr


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/debug/pprof/heap", 404, "Not Found"),
        ("/debug/pprof/", 404, "Not Found"),
        ("/flamegraph", 400, 'parameter program: ""; rule: one of futex, kernel_locks, offcpu'),
        ("/flamegraph?program=heap", 400, 'parameter program: "heap"; rule: one of'),
        ("/flamegraph?program=futex&program=futex", 400, "parameter program: given 2 times; rule: once"),
        ("/debug/pprof/futex?seconds=0", 400, 'parameter seconds: "0"; rule: a whole number from 1 to 60'),
        ("/debug/pprof/futex?seconds=61", 400, "parameter seconds"),
        ("/debug/pprof/futex?seconds=-1", 400, "parameter seconds"),
        ("/flamegraph?program=futex&by=owner", 400, 'parameter by: "owner"; rule: one of waiter, holder for'),
        (
            "/flamegraph?program=kernel_locks&by=waker",
            400,
            'parameter by: "waker"; rule: one of waiter, holder for program=kernel_locks',
        ),
        (
            "/flamegraph?program=offcpu&by=holder",
            400,
            'parameter by: "holder"; rule: one of waiter, waker for program=offcpu',
        ),
        ("/flamegraph?by=waker", 400, 'parameter program: ""; rule: one of'),
        ("/debug/pprof/holders?program=offcpu", 400, 'parameter by: "holder"; rule: one of waiter, waker'),
        ("/debug/pprof/wakers?seconds=61", 400, "parameter seconds"),
        ("/debug/pprof/futex?comm=%FF", 400, "parameter comm"),
    ],
)
def test_errors(running: Exporter, path: str, status: int, says: str) -> None:
    found = running.ask(path)
    assert found[0] == status
    assert found[2].decode().startswith(says)
    assert running.ask(path, "POST")[0] == 405


def test_head_and_a_sampler_that_is_gone(running: Exporter) -> None:
    status, headers, body = running.ask("/debug/pprof/futex", "HEAD")
    assert (status, body) == (200, b"")
    assert headers["Content-Type"] == "application/octet-stream"
    assert headers["Content-Disposition"] == 'attachment; filename="futex.pb.gz"'
    assert int(headers["Content-Length"]) > 100


def test_only_so_many_profiles_are_taken_at_a_time(running: Exporter) -> None:
    with ThreadPoolExecutor(12) as pool:
        paths = ["/debug/pprof/futex?seconds=3"] * 12
        statuses = sorted(status for status, _, _ in pool.map(running.ask, paths))
    assert statuses == [200] * 8 + [503] * 4
    assert running.ask("/debug/pprof/futex")[0] == 200


def test_one_address_cannot_have_all_of_them() -> None:
    class Never:
        async def wait_until_settled(self) -> None:
            await asyncio.Event().wait()

    async def refused(service: Service, sources: list[str]) -> list[str]:
        asked = [asyncio.ensure_future(service.wait_until_settled(source)) for source in sources]
        done, waiting = await asyncio.wait(asked, timeout=0.1)
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        assert {one.exception().status_code for one in done} == {503}  # type: ignore[union-attr]
        return sorted(source for source, one in zip(sources, asked, strict=True) if one in done)

    service = Service(Never(), WebConfig(None), 1.0)  # type: ignore[arg-type]
    try:
        for _ in range(2):  # the second time, the places of the first are free
            wanted = ["192.0.2.1"] * 10 + ["192.0.2.2"] * 4 + ["192.0.2.3"] * 5
            assert asyncio.run(refused(service, wanted)) == ["192.0.2.1"] * 2 + ["192.0.2.3"]
    finally:
        service.close()
