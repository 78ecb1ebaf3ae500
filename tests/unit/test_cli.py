"""The command line, run as its users run it: exit codes, messages, no tracebacks."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lockd.trace.futex.lock_rows import COLUMNS
from tests.support.top_daemon import serving

ROOT = Path(__file__).parents[2]
PYTHON = "/usr/bin/python3"


def lockd(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "-m", "lockd", *args],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def errors(*args: str, code: int = 2) -> list[str]:
    """The lines on standard error of a run that must fail with `code`, without their prefix."""
    done = lockd(*args)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    lines = done.stderr.splitlines()
    assert lines and all(line.startswith("lockd: error: ") for line in lines), done.stderr
    return [line.removeprefix("lockd: error: ") for line in lines]


def test_version() -> None:
    done = lockd("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("lockd ")


def test_help_names_every_command() -> None:
    done = lockd("--help")
    assert done.returncode == 0
    for command in ("run", "check", "doctor", "top"):
        assert f"\n    {command} " in done.stdout


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("run", ["--config.file", "--web.listen-address", "--web.config.file", "--log.level",
                 "--strict"]),
        ("check", ["--config.file", "--web.listen-address", "--web.config.file", "--log.level",
                   "--quiet"]),
        ("top", ["--url", "--interval", "--once", "--sort", "--by", "--kind", "--limit", "--insecure"]),
    ],
)  # fmt: skip
def test_help_names_every_flag(command: str, flags: list[str]) -> None:
    done = lockd(command, "--help")
    assert done.returncode == 0
    for flag in flags:
        assert f"{flag} " in done.stdout or f"{flag}\n" in done.stdout


def test_no_command() -> None:
    assert errors() == ["the following arguments are required: COMMAND", "see: lockd --help"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fly"], "argument COMMAND: invalid choice: 'fly'"),
        (["run", "--fast"], "unrecognized arguments: --fast"),
        (["run", "--config"], "unrecognized arguments: --config"),  # flags are not abbreviated
        (["doctor", "--strict"], "unrecognized arguments: --strict"),
        (["check", "--strict"], "unrecognized arguments: --strict"),
        (["run", "--log.level=loud"], "argument --log.level: invalid choice: 'loud'"),
        (
            ["run", "--web.listen-address=::1:80"],
            "argument --web.listen-address: '::1:80' is not HOST:PORT, such as 127.0.0.1:9776",
        ),
        (
            ["run", "--web.listen-address=:80", "--web.listen-address=:80"],
            "argument --web.listen-address: the same address is given twice",
        ),
        (
            ["top", "--interval=1"],
            "argument --interval: '1' is not a duration from 100ms to 1h, such as 1s",
        ),
        (
            ["top", "--interval=50ms"],
            "argument --interval: '50ms' is not a duration from 100ms to 1h, such as 1s",
        ),
        (["top", "--limit=0"], "argument --limit: '0' is not a whole number from 1 to 10000"),
        (["top", "--sort=name"], "argument --sort: invalid choice: 'name'"),
        (
            ["top", "--kind=lock,mutex"],
            "argument --kind: 'lock,mutex' is not lock, pi, cond, other with commas between",
        ),
        (
            ["top", "--url=localhost:9776"],
            "argument --url: 'localhost:9776' does not look like http://HOST:PORT",
        ),
        (["top", "--url=http://u:secret@h:port"], "argument --url: 'http://h:port' is not a URL"),
    ],
)
def test_wrong_usage(args: list[str], message: str) -> None:
    assert errors(*args)[0].startswith(message)


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_wrong_config_says_everything_and_starts_nothing(command: str, tmp_path: Path) -> None:
    file = tmp_path / "lockd.yaml"
    file.write_text("period: 5\nlog: {level: loud}\nserie: {}\n")
    assert errors(command, f"--config.file={file}") == [
        f"{file}:1: period: 5 is not a duration from 10ms to 10s",
        f"{file}:2: log.level: loud is not one of debug, info, warning, error",
        f'{file}:3: serie: unknown key; did you mean "series"?',
    ]


def test_a_quiet_check_says_only_what_is_wrong(tmp_path: Path) -> None:
    """`check --quiet` says nothing about this host, which may well lack what the configuration asks for."""
    file = tmp_path / "lockd.yaml"
    file.write_text("period: 1s\nprograms: {futex: {mode: calls, mechanism: kprobe}}\n")
    done = lockd("check", "--quiet", f"--config.file={file}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    file.write_text("period: 5\n")
    assert len(errors("check", "--quiet", f"--config.file={file}")) == 1


def test_a_missing_config(tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"
    expected = f"{file}: cannot read this configuration: No such file or directory"
    assert errors("run", f"--config.file={file}") == [expected]


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-m", "lockd", "check", b"--config.file=/\xff"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"lockd: error: /\\udcff: cannot read this configuration")


def with_output(output: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run lockd with `output`, a redirection of the shell, and return the result."""
    command = f'exec "$0" -m lockd "$@" {output}'
    return subprocess.run(
        ["sh", "-c", command, PYTHON, *args],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )


FULL = "lockd: error: standard output: cannot be written: No space left on device\n"
RECORD = f"{','.join(COLUMNS)}\n7,8,0x7f00,1500,9,900,9,3,2,0,0,app;main\n"


@pytest.mark.parametrize("how", [(), ("PYTHONUNBUFFERED=1",)])
@pytest.mark.parametrize("args", ["check", "doctor", "--help", "check --help", "--version", "analyze FILE"])
def test_an_output_that_is_full(args: str, how: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "records"
    file.write_text(RECORD)
    words = [word.replace("FILE", str(file)) for word in args.split()]
    command = ["env", *how, "sh", "-c", 'exec "$0" -m lockd "$@" >/dev/full', PYTHON, *words]
    done = subprocess.run(command, check=False, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, FULL)


def test_top_with_an_output_that_is_full() -> None:
    with serving() as daemon:
        done = with_output(">/dev/full", "top", "--once", "--interval=100ms", f"--url={daemon.url}")
    assert (done.returncode, done.stderr) == (1, FULL)


@pytest.mark.parametrize("args", ["check", "doctor", "--help", "--version"])
def test_an_output_that_is_closed(args: str) -> None:
    done = with_output(">&-", args)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert with_output("2>&-", args).returncode == 0
    assert with_output("<&- >&- 2>&-", args).returncode == 0


@pytest.mark.parametrize("output", [">&-", ">/dev/full", "<&- >&- 2>&-"])
def test_a_result_for_a_file_needs_no_output(output: str, tmp_path: Path) -> None:
    records, page = tmp_path / "records", tmp_path / "page.html"
    records.write_text(RECORD)
    done = with_output(output, "analyze", "--html", str(page), str(records))
    assert (done.returncode, done.stderr) == (0, "")
    assert page.read_text().endswith("</html>\n")


def test_a_library_writes_to_a_file_without_any_output(tmp_path: Path) -> None:
    """Other programs may call the tools, too, and may have closed their standard output."""
    code = "import sys; sys.stdout = None; from pathlib import Path; from lockd.trace.core import output; "
    code += "output.write_text(Path(sys.argv[1]), ['result'])"
    file = tmp_path / "file"
    subprocess.run([PYTHON, "-c", code, str(file)], check=True, cwd=ROOT, timeout=60)
    assert file.read_text() == "result"


def test_ctrl_c_is_silent(tmp_path: Path) -> None:
    fifo = tmp_path / "records"
    os.mkfifo(fifo)
    command = [PYTHON, "-m", "lockd", "analyze", str(fifo)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            writer = _open_once_read(fifo)  # nothing is written: lockd waits for records
            _wait_until_asleep(child.pid)  # between open() and read() Python would not act on the signal
            child.send_signal(signal.SIGINT)
            assert child.communicate(timeout=60) == (b"", b"")
            assert child.returncode == 130
            os.close(writer)
        finally:
            child.kill()


def _wait_until_asleep(pid: int) -> None:
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < end, f"process {pid} does not wait for anything"
        time.sleep(0.02)


def _open_once_read(fifo: Path) -> int:
    """Open a FIFO for writing, without blocking; this fails until lockd has it open for reading."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno == errno.ENXIO
            time.sleep(0.02)
    pytest.fail(f"lockd does not open {fifo}")
