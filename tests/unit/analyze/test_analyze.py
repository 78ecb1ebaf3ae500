"""`lockd analyze` prints the right numbers for known records, and its pictures show them."""

from __future__ import annotations

import argparse
import io
import json
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lockd import cli
from lockd.analyze import command, pictures, report, statistics
from lockd.analyze.records import Lock, Records, Thread, read
from lockd.errors import UsageError
from lockd.trace.futex import lock_rows
from tests.needs import need

ROOT = Path(__file__).resolve().parents[3]
START = 1_000_000_000_000
MS = 1_000_000
PIPE, RWSEM = 0xFFFF888100000040, 0xFFFF888100000080
RECORDS = f"""\
t,0,__mutex_lock.constprop.0+0x1f1,anon_pipe_write+0x43,vfs_write+0x398
s,writer,P10_T11,mutex,{PIPE:#x},{START},{20 * MS},4,0
s,writer,P10_T12,mutex,{PIPE:#x},{START},{30 * MS},1,0
t,1,rwsem_down_read_slowpath+0x10,down_read+0x5,iterate_dir+0x86
s,"a,b",P20_T20,rwsem_read,{RWSEM:#x},{START + 100 * MS},{2 * MS},1,1
s,writer,P10_T11,mutex,{PIPE:#x},{START + 200 * MS},{120 * MS},1,0
s,writer,P10_T12,mutex,{PIPE:#x},{START + 200 * MS},{60 * MS},1,0,ongoing
s,idle,P30_T30,rwsem_write,{RWSEM:#x},{START + 250 * MS},0,7,1
"""
CSV = f"{','.join(lock_rows.COLUMNS)}\n"
CSV_WITH_NAMES = f"{','.join((*lock_rows.COLUMNS, *lock_rows.NAMES))}\n"
PIPE_LABEL, RWSEM_LABEL = f"pipe->mutex {PIPE:#x}", f"inode->i_rwsem {RWSEM:#x}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "records"
    path.write_text(RECORDS)
    return path


@pytest.fixture
def records(file: Path) -> Records:
    return read([file])


def test_what_is_read(records: Records) -> None:
    assert len(records.rows) == 6
    assert records.locks == (Lock(0, PIPE), Lock(0, RWSEM))
    assert records.threads == (Thread(10, 11), Thread(10, 12), Thread(20, 20), Thread(30, 30))
    assert records.comms[2] == "a,b"
    assert records.types == {0: "mutex", 1: "rwsem_read/rwsem_write"}
    assert [records.label(lock) for lock in (0, 1)] == [PIPE_LABEL, RWSEM_LABEL]
    assert records.callers(1) == ("anon_pipe_write+0x43", "vfs_write+0x398")
    assert records.period_ns == 50 * MS
    assert records.rows["ongoing"].tolist() == [0, 0, 0, 0, 1, 0]


def test_totals(records: Records) -> None:
    pipe, rwsem = statistics.totals(records, "lock")
    assert (pipe.subject, pipe.wait_ns, pipe.accesses, pipe.threads, pipe.ongoing) == (0, 230 * MS, 7, 2, 1)
    assert (rwsem.wait_ns, rwsem.accesses, rwsem.threads, rwsem.average_ns) == (2 * MS, 8, 2, MS / 4)
    of_pipe = statistics.totals(records.where(records.rows["lock"] == 0), "thread")
    assert [(one.subject, one.wait_ns, one.accesses) for one in of_pipe] == [
        (0, 140 * MS, 5),
        (1, 90 * MS, 2),
    ]


def test_the_worst_periods(records: Records) -> None:
    found = [(one.lock, one.start_ns - START, one.average_ns) for one in statistics.lock_periods(records)]
    assert found == [
        (0, 200 * MS, 90 * MS), (0, 0, 10 * MS), (1, 100 * MS, 2 * MS), (1, 250 * MS, 0)
    ]  # fmt: skip


def test_time_has_no_gaps(records: Records) -> None:
    starts = statistics.period_starts(records) - START
    assert starts.tolist() == [at * 50 * MS for at in range(6)]
    nothing = pytest.approx(np.nan, nan_ok=True)
    pipe = records.where(records.rows["lock"] == 0)
    average = statistics.average_access(pipe, starts + START) / MS
    assert average.tolist() == [10, nothing, nothing, nothing, 90, nothing]
    worst = statistics.worst_average_access(records, starts + START) / MS
    assert worst.tolist() == [10, nothing, 2, nothing, 90, 0]


def test_threads_that_wait_do_so_before_the_period_in_which_the_wait_ends(records: Records) -> None:
    pipe = records.where(records.rows["lock"] == 0)
    threads, waiting = statistics.waiting_threads(pipe, statistics.period_starts(records))
    # A wait of 120 ms and a wait of 60 ms end by the end of the fifth period, the only one that both fill.
    assert threads.tolist() == [2, 0, 1, 2, 2, 0]
    assert (waiting * 50).tolist() == pytest.approx([50, 0, 20, 60, 100, 0])


def test_a_thread_waits_but_once_at_a_time(tmp_path: Path) -> None:
    """Of two waits of a thread in a row, the first is placed before the second: they do not overlap."""
    line = "s,x,P1_T1,mutex,0xffff888100000040,{},{},1,0\n"
    path = tmp_path / "records"
    path.write_text("t,0,f+0x1\n" + line.format(START, 40 * MS) + line.format(START + 50 * MS, 70 * MS))
    records = read([path], 50 * MS)
    starts = statistics.period_starts(records)
    threads, waiting = statistics.waiting_threads(records, starts)
    assert (starts - START).tolist() == [-50 * MS, 0, 50 * MS]
    assert threads.tolist() == [1, 1, 1]
    assert (waiting * 50).tolist() == pytest.approx([10, 50, 50])


def test_waiting_adds_up_whatever_the_records(tmp_path: Path) -> None:
    path = tmp_path / "records"
    random = np.random.default_rng(7)
    lines = [
        f"s,x,P1_T{tid},mutex,0xffff888100000040,{START + int(at) * 50 * MS},{int(wait)},1,0\n"
        for tid, at, wait in zip(
            random.integers(1, 9, 300), random.integers(0, 99, 300), random.exponential(3e8, 300), strict=True
        )
    ]
    path.write_text("".join(lines))
    records = read([path], 50 * MS)
    threads, waiting = statistics.waiting_threads(records, statistics.period_starts(records))
    assert waiting.sum() * 50 * MS == pytest.approx(records.rows["wait_ns"].sum())
    assert (waiting <= threads + 1e-9).all()


def test_records_of_milli_klockstat(tmp_path: Path) -> None:
    """milli-klockstat swaps the ids of process and thread, and calls a release of an rwsem a semaphore."""
    path = tmp_path / "old"
    path.write_text(
        "t,-14,[Stack Trace Not Obtained]\nt,7,mutex_lock+0x1,do_work+0x20\n"
        "s,a, b,P11_T10,Mutex,0xffff888100000040,1000,5,1,7\n"
        "s,c,P12_T12,Semaphore,0xffff888100000080,1000,5,1,-14\n"
    )
    records = read([path], MS)
    assert records.threads[0] == Thread(pid=10, tid=11)
    assert records.comms[0] == "a, b"
    assert records.types == {0: "mutex", 1: "rwsem release"}
    assert records.stacks[int(records.rows["stack"][1])] == ()


def test_calls_of_lockd_trace_futex(tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    path.write_text(
        "pid,tid,addr,blocked_us,sys_us,max_blocked_us,max_sys_us,wait_count,blocked_count,wake_count,errors,"
        "stack,kind,lock,ongoing\n"
        '7,8,0x7f00,1500,9,900,9,3,2,0,0,"app;main;lock_it",lock,app:registry,1\n'
        '7,7,0x7f00,0,9,0,9,0,0,5,0,"app",,,0\n'
    )
    records = read([path])
    assert records.label(0) == "app:registry 0x7f00 of 7"
    (total,) = statistics.totals(records, "lock")
    assert (total.wait_ns, total.accesses, total.threads, total.ongoing) == (1500_000, 3, 1, 1)
    assert records.stacks[int(records.rows["stack"][0])] == ("lock_it", "main")
    assert len(statistics.period_starts(records)) == 0
    assert statistics.lock_periods(records) == []


def test_stacks_of_processes_begin_where_a_thread_waits(tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    path.write_text(
        f'{CSV}7,8,0x7f00,1500,9,900,9,3,2,0,0,"app;main;Cache<int, long>::get;std::mutex::lock;'
        'pthread_mutex_lock;__lll_lock_wait"\n'
        '7,8,0x7f00,1000,9,900,9,3,2,0,0,"app;main;up"\n'
    )
    records = read([path])
    of_stacks = statistics.totals(records, "stack")
    assert [report.stack(records, total.subject) for total in of_stacks] == [
        "Cache<int, long>::get < main",
        "up < main",  # the kernel has a locking function of this name
    ]


def test_files_are_put_together(file: Path, tmp_path: Path) -> None:
    """Each file numbers its stacks on its own."""
    other = tmp_path / "other"
    other.write_text(f"t,0,iterate_dir+0x86\ns,c,P9_T9,rwsem_read,{RWSEM:#x},{START},{5 * MS},2,0\n")
    records = read([file, other])
    pipe, rwsem = statistics.totals(records, "lock")
    assert (pipe.wait_ns, rwsem.wait_ns, rwsem.threads) == (230 * MS, 7 * MS, 3)
    assert records.stacks[int(records.rows["stack"][-1])] == ("iterate_dir+0x86",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no records; rule: s,COMM"),
        ("t,0,f+0x1\n", "no records; rule: s,COMM"),
        ("t,0,f+0x1\nTracing locks\n", ":2: 'Tracing locks'; rule: s,COMM"),
        ("s,x,P1_T1,mutex,0xff,1,2,3\n", ":1: 's,x,P1_T1,mutex,0xff,1,2,3'; rule:"),
        ("s,x,P1_T1,mutex,ff,1,2,3,0\n", ":1: "),
        ("s,x,P1_T1,mutex,0xff,1,2,0,0\n", ":1: 0 accesses; rule: 1 or more"),
        (f"s,x,P1_T1,mutex,0xff,{2**63},2,1,0\n", ":1: a number above"),
        (f"s,x,P1_T1,mutex,0xff,{'9' * 5000},2,1,0\n", ":1: 's,x,P1_T1"),
        (f"{CSV}1,1,0x10,{2**63},0,0,0,1,1,0,0,x\n", "a number above"),
        (f"{CSV_WITH_NAMES}1,1,0x10,1,0,0,0,1,1,0,0,x,,,{2**64 - 1}\n", "a number above"),
        (f"{CSV}1,1,0x10,{'9' * 5000},0,0,0,1,1,0,0,x\n", ":2: column blocked_us: "),
        (f'{CSV}1,1,0x10,1,0,0,0,1,1,0,0,"{"x" * 200_000}"\n', ":2: field larger than field limit"),
        ("pid,tid\n1,2\n", ":1: column addr: is missing; rule:"),
    ],
)
def test_a_bad_file_is_told_with_line_and_rule(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    assert cli.main(["analyze", str(path)]) == UsageError.exit_code
    error = capsys.readouterr().err
    assert f"{path}{says}" in error or f"{path}: {says}" in error
    assert cli.main(["analyze", str(tmp_path / "none")]) == UsageError.exit_code
    assert f"{tmp_path / 'none'}: cannot be read: No such file" in capsys.readouterr().err


def test_the_text(file: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert cli.main(["analyze", str(file)]) == 0
    text = capfdbinary.readouterr().out.decode()
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    assert ["230.00 ms (1 open)", "7", "32.86 ms", "2", "mutex", PIPE_LABEL] in rows
    assert ["0.200 s", "90.00 ms", "180.00 ms", "2", "2", "mutex", PIPE_LABEL] in rows
    assert ["140.00 ms", "5", "28.00 ms", "10", "11", "writer"] in rows
    assert text.startswith("6 records: 2 locks, 4 threads, 15 accesses that waited 232.00 ms\n")
    assert "anon_pipe_write+0x43 < vfs_write+0x398" in text


def test_what_is_left_out_moves_no_time(file: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert cli.main(["analyze", "--from", "0.1", str(file)]) == 0
    text = capfdbinary.readouterr().out.decode()
    assert re.findall(r"^ +(\d\.\d{3}) s ", text, re.MULTILINE) == ["0.200", "0.100", "0.250"]


def test_a_picture_of_some_records_has_their_times(records: Records) -> None:
    need("python3:matplotlib")
    args = argparse.Namespace(exclude=[], since=0.19, until=None, min_threads=1)
    waiting, *_ = pictures.figure(command.select(records, args), 0).axes
    assert waiting.lines[0].get_data()[0].tolist() == pytest.approx([0.1, 0.15, 0.2, 0.25])


@pytest.mark.parametrize("options", [["--from", "2"], ["--to", "3"], ["--from", "2", "--to", "3"]])
def test_records_without_times_cannot_be_chosen_by_time(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calls.csv"
    path.write_text(f"{CSV}7,8,0x7f00,1500,9,900,9,3,2,0,0,app;main\n")
    assert cli.main(["analyze", *options, str(path)]) == UsageError.exit_code
    says = f"{' '.join(options[:2])}: these records have no start times; rule: only records of"
    assert says in capsys.readouterr().err


def test_periods_that_are_too_many_to_be_drawn_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records"
    path.write_text("".join(f"s,x,P1_T1,mutex,0xff,{start},2,1,0\n" for start in (1, 2**60)))
    assert cli.main(["analyze", str(path)]) == UsageError.exit_code
    assert "periods of 1e-06 ms; rule: at most 4000000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("starts", "period_ms", "is_assumed"),
    [
        ((0,), 50, True),
        ((10,), 10, True),
        ((0, 2000), 50, True),
        ((0, 1000, 3000), 1000, False),
        ((0, 500, 1000), 500, False),
        ((0, 50, 200), 50, False),
        ((0, 100, 200, 300, 400), 50, True),  # could be periods of 50 ms, some of which had no wait
        (range(0, 1000, 100), 100, False),
        ((0, 7, 14), 7, False),
    ],
)
def test_the_length_of_periods(
    starts: Sequence[int],
    period_ms: int,
    is_assumed: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "records"
    path.write_text("".join(f"s,x,P1_T1,mutex,0xff,{7 * START + at * MS},2,1,0\n" for at in starts))
    assert read([path]).period_ns == period_ms * MS
    said = f"periods of {period_ms} ms are assumed"
    assert (said in capsys.readouterr().err) == is_assumed


@pytest.mark.parametrize(
    ("options", "waited"),
    [
        (["--lock", "inode->i_rwsem"], "232.00 ms"),
        (["--exclude", "writer"], "2.00 ms"),
        (["--from", "0.05", "--to", "0.2"], "2.00 ms"),
        (["--min-threads", "2"], "232.00 ms"),
        (["--min-threads", "2", "--to", "0.15"], "50.00 ms"),  # `idle` waits later, so does not count
        (["--min-threads", "2", "--from", "0.15"], "180.00 ms"),
    ],
)
def test_records_can_be_chosen(
    options: list[str], waited: str, file: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert cli.main(["analyze", *options, str(file)]) == 0
    assert f"waited {waited}\n" in capfdbinary.readouterr().out.decode()


def test_the_last_name_of_a_thread_counts(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """A child that executes another program has its parent's name before that."""
    path = tmp_path / "records"
    waits = (("sh", 40, 2), ("cc1", 40, 8), ("make", 41, 1))
    path.write_text(
        "".join(f"s,{comm},P{tid}_T{tid},mutex,0xff,{START},{n * MS},1,0\n" for comm, tid, n in waits)
    )
    for name, waited in (("cc1", "1.00 ms"), ("sh", "11.00 ms")):
        assert cli.main(["analyze", "--exclude", name, str(path)]) == 0
        assert f"waited {waited}\n" in capfdbinary.readouterr().out.decode()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--lock", "nothing"], "--lock nothing: no record is of it; rule:"),
        (["--lock", f"{PIPE:#x}", "--exclude", "writer"], f"--lock {PIPE:#x}: no record is of it; rule:"),
        (["--min-threads", "3"], "no records are left; rule:"),
        (["--min-threads", "2", "--exclude", "writer", "--from", "0.2"], "no records are left; rule:"),
        (["--min-threads", "2", "--from", "9"], "no records are left; rule:"),
        (["--from", "-1"], "is not a number of seconds"),
        (["--period", "0"], "'0' is not a whole number above 0"),
        (["--period", "86400001"], "argument --period: '86400001' is not from 1 to 86400000, a day in ms"),
        (["--period", "99999999999999"], "argument --period: '99999999999999' is not from 1 to 86400000"),
        (["--png", "/nowhere/x.png"], "/nowhere/x.png: cannot be written"),
    ],
)
def test_options_that_make_no_sense(
    options: list[str], says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["analyze", *options, str(file)]) == UsageError.exit_code
    assert says in capsys.readouterr().err


def test_pictures_show_the_numbers(records: Records) -> None:
    need("python3:matplotlib")
    waiting, threads, worst, average = pictures.figure(records, 0).axes
    starts = statistics.period_starts(records)
    seconds = [0.0, 0.05, 0.1, 0.15, 0.2, 0.25]
    pipe = records.where(records.rows["lock"] == 0)
    assert [line.get_label() for line in waiting.lines] == [PIPE_LABEL, RWSEM_LABEL]
    for axes, expected in (
        (waiting, statistics.waiting_threads(pipe, starts)[1]),
        (threads, statistics.waiting_threads(pipe, starts)[0]),
        (worst, statistics.worst_average_access(records, starts) / MS),
        (average, statistics.average_access(pipe, starts) / MS),
    ):
        x, y = axes.lines[0].get_data()
        assert x.tolist() == pytest.approx(seconds)
        assert y.tolist() == pytest.approx(expected.tolist(), nan_ok=True)
        low, high = axes.get_ylim()
        assert low == 0 and high > np.nanmax(expected)
    assert "pipe->mutex" in average.get_title(loc="left")


def test_png_and_page_are_written(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    need("python3:matplotlib")
    png, html = tmp_path / "x.png", tmp_path / "x.html"
    assert cli.main(["analyze", "--png", str(png), "--html", str(html), str(file)]) == 0
    content = png.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1200, 1100)
    assert len(content) > 20_000  # a blank picture of that size has a fifth of these bytes
    page = html.read_text()
    assert page.count("<svg") == 1
    assert page.count("<table>") == 5
    assert "pipe-&gt;mutex" in page
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(h", page)
    assert capfd.readouterr().out == ""


def test_a_long_recording_makes_a_page_that_a_browser_can_show(tmp_path: Path) -> None:
    need("python3:matplotlib")
    path, page = tmp_path / "records", tmp_path / "x.html"
    path.write_text(
        "".join(f"s,x,P1_T1,mutex,0xff,{START + n * 50 * MS},{n % 7 * MS},1,0\n" for n in range(2000))
    )
    assert cli.main(["analyze", "--html", str(page), str(path)]) == 0
    assert page.read_text().count("<use") < 200


@pytest.mark.parametrize("periods", [10, 3000])
def test_a_single_value_between_gaps_can_be_seen(periods: int, tmp_path: Path) -> None:
    need("python3:matplotlib")
    path, image = tmp_path / "records", io.BytesIO()
    at = (0, periods // 3, periods - 1)
    path.write_text("".join(f"s,x,P1_T1,mutex,0xff,{START + n * 50 * MS},{MS},1,0\n" for n in at))
    drawn = pictures.figure(read([path], 50 * MS), 0)
    drawn.savefig(image, format="rgba")
    area = drawn.axes[3].get_window_extent()
    pixels = np.frombuffer(image.getvalue(), np.uint8).reshape(1100, 1200, 4).astype(int)
    pixels = pixels[1100 - int(area.y1) : 1100 - int(area.y0), int(area.x0) : int(area.x1)]
    is_blue = (pixels[..., 2] - pixels[..., 0] > 60).any(axis=0)
    assert np.count_nonzero(np.diff(is_blue.astype(int)) == 1) == 3


def test_a_name_with_dollars_is_no_formula(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java's lambdas have names with two dollars."""
    need("python3:matplotlib")
    monkeypatch.setattr(Records, "label", lambda self, lock: "shop:Cart$$Lambda/0x1")
    page = tmp_path / "x.html"
    assert cli.main(["analyze", "--html", str(page), str(file)]) == 0
    picture = re.search(r"<svg.*</svg>", page.read_text(), re.DOTALL)
    assert picture and "shop:Cart$$Lambda/0x1" in picture[0]


def test_without_matplotlib_the_package_is_named(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["analyze", "--png", str(tmp_path / "x.png"), str(file)]) == 3
    assert "install the package python3-matplotlib" in capsys.readouterr().err
    assert cli.main(["analyze", str(file)]) == 0  # text needs no matplotlib


def test_text_loads_no_matplotlib(file: Path) -> None:
    code = "import sys; from lockd import cli; cli.main(sys.argv[1:]); print('matplotlib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "analyze", str(file)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_the_notebook_runs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells run in their order, as in a notebook, on the records of this test."""
    need("python3:matplotlib")
    notebook = json.loads((ROOT / "docs/trace/klock.ipynb").read_text())
    names: dict[str, object] = {"display": lambda _: None}
    monkeypatch.chdir(file.parent)
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells
    for cell in cells:
        exec(compile(cell, "docs/trace/klock.ipynb", "exec"), names)
    assert isinstance(names["records"], Records)
    assert len(names["drawn"].axes) == 4  # type: ignore[attr-defined]
