"""What lockd imports does not depend on where, and in which environment, it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.traps import Traps

ROOT = Path(__file__).resolve().parents[3]

EXPORTER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from lockd.service.exporter import Exporter, listen
exporter = Exporter(listen([("127.0.0.1", 0)]), None, "info")
exporter.serve()
exporter.control.settimeout(60)
print(exporter.control.recv(64).decode())
sys.exit(exporter.end())
"""


@pytest.fixture
def traps(tmp_path: Path) -> Traps:
    return Traps(tmp_path)


def started(traps: Traps, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **traps.environment}
    return subprocess.run(
        command, cwd=traps.directory, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_traps_work(traps: Traps) -> None:
    started(traps, sys.executable, "-c", "import lockd")
    assert traps.sprung


def test_the_exporter_imports_nothing_from_where_it_is_started(traps: Traps) -> None:
    done = started(traps, sys.executable, "-I", "-c", EXPORTER)
    assert traps.sprung == set()
    assert (done.returncode, done.stdout) == (0, "serving\n"), done.stderr


def test_nor_does_the_installed_command(traps: Traps, tmp_path: Path) -> None:
    command = tmp_path / "lockd.sh"
    command.write_text((ROOT / "deploy/lockd.sh").read_text().replace("@LIB@", str(ROOT)))
    done = started(traps, "sh", command, "check", "--config.file=none.yaml")
    assert traps.sprung == set()
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "none.yaml" in done.stderr
