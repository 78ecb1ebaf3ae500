"""Tests of the processes that the daemon starts: what they can do to it, and that none of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockd.errors import LockdError
from lockd.load import child
from lockd.load.child import Loader, receive_result
from lockd.load.settings import LoadSettings
from lockd.process import isolation
from lockd.service import exporter as exporters
from lockd.service.exporter import Exporter, listen

ROOT = Path(__file__).resolve().parents[3]


def connected(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_no_host_is_every_interface() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"host: has no IPv6: {error.strerror}")
    (listening,) = listen([("", 0)])
    with listening:
        port = listening.getsockname()[1]
        assert [connected(host, port) for host in ("127.0.0.1", "::1")] == [True, True]


def test_no_host_where_ipv6_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_ipv6", False)  # as on a kernel that was started without IPv6
    (listening,) = listen([("", 0)])
    with listening:
        assert listening.family == socket.AF_INET
        assert connected("127.0.0.1", listening.getsockname()[1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def resolve(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Have the name `name` stand for these addresses, in this order."""
    real = socket.getaddrinfo

    def found(host: bytes, port: int, *asked: int, **more: int) -> list[Any]:
        if host != b"name":
            return list(real(host, port, *asked, **more))
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@contextlib.contextmanager
def listened(*addresses: tuple[str, int]) -> Iterator[list[str]]:
    """Listen, and yield the hosts of the sockets."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(sock).getsockname()[0] for sock in listen(list(addresses))]


def test_a_name_is_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """/etc/hosts may have `::1 localhost` first, while Prometheus asks at 127.0.0.1."""
    resolve(monkeypatch, "127.0.0.2", "127.0.0.1", "127.0.0.2")
    port = free_port()
    with listened(("name", port)) as hosts:
        assert hosts == ["127.0.0.2", "127.0.0.1"]
        assert connected("127.0.0.1", port)


def test_a_name_and_one_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, "127.0.0.1")
    port = free_port()
    with listened(("127.0.0.1", port), ("name", port)) as hosts:
        assert hosts == ["127.0.0.1"]


@pytest.mark.parametrize("elsewhere", ["192.0.2.1", "2001:db8::1"])  # addresses for documents
def test_an_address_of_a_name_that_this_host_does_not_have(
    elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, elsewhere, "127.0.0.1")
    with listened(("name", 0)) as hosts:
        assert hosts == ["127.0.0.1"]
    resolve(monkeypatch, elsewhere)
    with pytest.raises(LockdError, match="name:9776: cannot listen there: "):
        listen([("name", 9776)])


def test_an_address_of_a_name_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, "127.0.0.2", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LockdError, match="cannot listen there: Address already in use"):
            listen([("name", port)])
        assert not connected("127.0.0.2", port)


TALKATIVE = """
import socket, sys
sys.path.insert(0, {root!r})
from lockd.load.child import send_result
from lockd.kernel.manifest import Manifest
sys.stdin.buffer.read()
print("INFO:a line of many", file=sys.stderr)
sys.stderr.write("WARNING:" + "word " * 100_000 + "\\n")
sys.stderr.flush()
send_result(socket.socket(fileno=int(sys.argv[1])), Manifest(0, (), (), (), (), {{}}, {{}}), [])
"""


def test_a_loader_with_much_to_say_hands_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loader writes more to standard error than a pipe has room for."""
    script = tmp_path / "loader.py"
    script.write_text(TALKATIVE.format(root=str(ROOT)))
    monkeypatch.setattr(isolation, "command", lambda module: [sys.executable, str(script)])
    monkeypatch.setattr(child, "LOADER_TIMEOUT", 20.0)
    caplog.set_level("INFO")
    manifest, fds = Loader(LoadSettings(("futex",), 64, 64, 64, 0, 1, "contention", "blocked", ())).result()
    assert (manifest.attached_ns, fds) == (0, [])
    assert [len(record.message) > 400_000 for record in caplog.records] == [False, True]


FLOOD = """
import os, sys
sys.stdin.buffer.read()
line = b"INFO:" + b"word " * 20_000 + b"\\n"
try:
    while True:
        os.write(2, line)
except OSError as error:
    size = os.lseek(2, 0, os.SEEK_CUR)
    os.ftruncate(2, os.lseek(2, -100, os.SEEK_CUR))
    os.write(2, f"\\n{{error.strerror}} after {{size}}\\n".encode())
    sys.exit(1)
"""


def test_a_loader_that_prints_without_end_fills_no_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "loader.py"
    script.write_text(FLOOD.format())
    monkeypatch.setattr(isolation, "command", lambda module: [sys.executable, str(script)])
    monkeypatch.setattr(child, "LOADER_TIMEOUT", 60.0)
    caplog.set_level("INFO")
    with pytest.raises(LockdError, match=r"^File too large after 6710\d{4}$"):
        Loader(LoadSettings(("futex",), 64, 64, 64, 0, 1, "contention", "blocked", ())).result()
    logged = sum(len(record.message) for record in caplog.records)
    assert 0 < logged < 2 * child.LAST_WORDS_BYTES


SLOW = """
import sys, time
sys.stdin.buffer.read()
print("INFO:compiling", file=sys.stderr)
print("a message of clang", file=sys.stderr, flush=True)
time.sleep(60)
"""


def test_a_loader_that_takes_too_long_is_killed_and_heard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "loader.py"
    script.write_text(SLOW)
    monkeypatch.setattr(isolation, "command", lambda module: [sys.executable, str(script)])
    caplog.set_level("INFO")
    loader = Loader(LoadSettings(("futex",), 64, 64, 64, 0, 1, "contention", "blocked", ()))
    while os.fstat(loader._errors.fileno()).st_size < len("INFO:compiling\na message of clang\n"):
        assert loader._child.poll() is None
        time.sleep(0.01)
    monkeypatch.setattr(child, "LOADER_TIMEOUT", 0.01)
    with pytest.raises(LockdError, match=r"^loader: nothing handed over within 0.01 s\na message of clang$"):
        loader.result()
    assert [record.message for record in caplog.records] == ["loader: compiling"]
    assert loader._child.returncode == -signal.SIGKILL


NO_MANIFEST = b'{"enums": []}'


@pytest.mark.parametrize(
    "sent",
    [
        (2**64 - 1).to_bytes(8, "little") + bytes(8),
        (2**40).to_bytes(8, "little") + bytes(8),
        len(NO_MANIFEST).to_bytes(8, "little") + bytes(8) + NO_MANIFEST,
        (2).to_bytes(8, "little") + bytes(8) + b"[]",
        (10**5).to_bytes(8, "little") + bytes(8) + b"[" * 10**5,
    ],
)
def test_what_is_no_manifest_is_an_error_in_words(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(LockdError, match="loader: "):
            receive_result(ours)


def test_an_exporter_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "ENDING_SECONDS", 0.2)
    listening = listen([("127.0.0.1", 0)])
    exporter = Exporter(listening, None, "info")
    exporter.serve()
    exporter.control.settimeout(60)
    assert exporter.control.recv(64) == b"serving"
    os.kill(exporter.pid, signal.SIGSTOP)
    port = listening[0].getsockname()[1]
    assert exporter.end() == -signal.SIGKILL
    listening[0].close()
    assert not connected("127.0.0.1", port)


KILLING = """
import os, signal, sys
sys.path.insert(0, {root!r})
from lockd.process import privileges
from lockd.service import exporter as exporters
from lockd.service import start
exporters.ENDING_SECONDS = 0.2
exporter = exporters.Exporter(exporters.listen([("127.0.0.1", 0)]), None, "info")
exporter.serve()
exporter.control.settimeout(60)
exporter.control.recv(64)
os.kill(exporter.pid, signal.SIGSTOP)
privileges.keep_only(start.NAMING | start.KILLING, dormant=start.RESTARTING)
{ends}
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give up privileges")
@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("sys.exit(exporter.end() != -signal.SIGKILL)", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_and_so_it_is_by_a_sampler_that_has_given_up_its_privileges(ends: str, code: int) -> None:
    """A sampler that has given up its privileges can still kill an exporter that does not end.

    The exporter also ends with the sampler, however that ends. A stopped exporter would keep the port.
    """
    lines = textwrap.dedent(KILLING).format(root=str(ROOT), ends=ends)
    done = subprocess.run(  # lasts until the exporter too has closed the pipes
        [sys.executable, "-c", lines], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
