"""A MariaDB server of our own for a load generator. It has no network, and its data is removed with it."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SERVER = "/usr/sbin/mariadbd"
READY_SECONDS = 300.0
# With durable writes, a load would measure the disk.
QUICK = ("--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0")


@contextlib.contextmanager
def database(socket: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server that listens on this socket. It ends with this process in any case."""
    with tempfile.TemporaryDirectory(prefix="lockd-bench-mariadb-", dir="/var/tmp") as name:
        directory = Path(name)
        options = ("--no-defaults", "--user=root", f"--datadir={directory / 'data'}")
        install = [
            "mariadb-install-db",
            *options,
            "--skip-test-db",
            "--auth-root-authentication-method=normal",
        ]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        own = (f"--socket={socket}", "--skip-networking", "--skip-grant-tables", *QUICK)
        with (directory / "log").open("w") as log:
            server = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", SERVER, *options, *own], stderr=log)
        try:
            _until_it_answers(server, socket, directory / "log")
            yield server
        finally:
            server.terminate()
            try:
                server.wait(READY_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _until_it_answers(server: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
    asked = ["mariadb", "--no-defaults", f"--socket={socket}", "-e", "SELECT 1"]
    deadline = time.monotonic() + READY_SECONDS
    while subprocess.run(asked, capture_output=True, check=False).returncode:
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{SERVER}: not ready in {READY_SECONDS:g} s:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)
