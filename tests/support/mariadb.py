"""A MariaDB server of a test's own, without a network. Only the data of running() outlives it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.needs import need

SERVER = "/usr/sbin/mariadbd"
COMM = f"mariadbd.{os.getpid():x}"
"""The name of the server's process by default: this host may have other servers."""
READY_SECONDS = 60.0


@dataclass(frozen=True)
class Server:
    socket: Path
    version: str
    pid: int

    def client(self, name: str, *arguments: str) -> list[str]:
        return [name, "--no-defaults", f"--socket={self.socket}", *arguments]

    def ask(self, query: str, delimiter: str = ";") -> list[list[str]]:
        """Return the rows of the answer to a query, or to several with the delimiter between them."""
        options = ("--batch", "--skip-column-names", f"--delimiter={delimiter}")
        asked = self.client("mariadb", *options, "-e", query)
        answer = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout
        return [line.split("\t") for line in answer.splitlines()]


@contextlib.contextmanager
def started(*options: str, comm: str = COMM) -> Iterator[Server]:
    """Yield a server that answers, with new data, in a process with the name `comm`."""
    need("mariadbd", "mariadb", "mariadb-install-db")
    made = tempfile.TemporaryDirectory(prefix="lockd-mariadb-", dir="/var/tmp")
    with made as name, running(Path(name), *options, comm=comm) as server:
        yield server


@contextlib.contextmanager
def running(directory: Path, *options: str, comm: str = COMM) -> Iterator[Server]:
    """Yield a server that answers. Its data is in the directory, and stays there.

    Its temporary tables are there too: at its start, a server deletes all tables in the directory for
    temporary tables, even those of other servers.
    """
    of_data = ("--no-defaults", "--user=root", f"--datadir={directory / 'data'}", f"--tmpdir={directory}")
    if not (directory / "data").exists():
        subprocess.run(
            ["mariadb-install-db", *of_data, "--skip-test-db", "--auth-root-authentication-method=normal"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    version = subprocess.check_output([SERVER, "--no-defaults", "--version"], text=True).split()[2]
    program, socket = directory / comm, directory / "socket"
    program.unlink(missing_ok=True)
    program.symlink_to(SERVER)
    own = (f"--socket={socket}", "--skip-networking", "--skip-grant-tables", *options)
    with (directory / "log").open("w") as log:
        process = subprocess.Popen([program, *of_data, *own], stderr=log)
    server = Server(socket, version.partition("-")[0], process.pid)
    try:
        _until_it_answers(server, process, directory / "log")
        yield server
    finally:
        process.terminate()
        try:
            process.wait(READY_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _until_it_answers(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    asked = server.client("mariadb", "-e", "SELECT 1")
    while subprocess.run(asked, capture_output=True, check=False).returncode:
        is_late = process.poll() is not None or time.monotonic() > deadline
        assert not is_late, f"{SERVER} does not answer:\n{log.read_text()[-2000:]}"
        time.sleep(0.1)
