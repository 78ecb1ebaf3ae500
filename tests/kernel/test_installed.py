"""lockd as `make install` leaves it, started somewhere else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from lockd_process import ROOT, Lockd
from traps import Traps


def test_no_process_of_it_imports_anything_from_where_it_is_started(tmp_path: Path) -> None:
    prefix = tmp_path / "usr"
    install = ["make", "-s", "install", f"PREFIX={prefix}", f"SYSCONFDIR={tmp_path}/etc", "DESTDIR=/"]
    subprocess.run(install, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (tmp_path / "here").mkdir()
    traps = Traps(tmp_path / "here")
    environment = {**os.environ, **traps.environment}
    daemon = Lockd(tmp_path, program=[prefix / "bin/lockd"], cwd=traps.directory, env=environment)
    try:
        assert daemon.metrics().sum("lockd_hook_attached") > 0
        daemon.get("/api/v1/threads")
    finally:
        code = daemon.stop()
    assert traps.sprung == set()
    assert code == 0, "".join(daemon.log)
