"""What a client that reaches the port can do to the daemon, and what the daemon's web configuration does."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from bench.cost import children_of
from lockd.config.reader import read_text
from lockd.config.schema import Config
from lockd.load.child import run_loader
from lockd.messages import unpack
from lockd.sample.budget.cpu_budget import JUDGE_SECONDS
from lockd.sample.sampler import Sampler, SamplerSettings
from lockd.service.start import load_settings
from tests.support.lockd_process import CHECKOUT, ROOT, Lockd

pytestmark = pytest.mark.untimed

NOBODYS = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"
PATIENCE_SECONDS = 60.0
"""The time that a process may take to be started again, on an emulated machine."""


def test_a_wrong_web_configuration_ends_it_with_2(tmp_path: Path) -> None:
    web = tmp_path / "web.yml"
    web.write_text("")
    command = [*CHECKOUT, "run", "--web.listen-address=127.0.0.1:0", f"--web.config.file={web}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_an_exporter_that_is_killed_comes_back_as_closed_as_it_was(tmp_path: Path) -> None:
    closed = f"basic_auth_users: {{alice: {NOBODYS}}}\n"
    with tempfile.TemporaryDirectory() as name:  # pytest's directory is for root alone
        Path(name).chmod(0o755)
        web = Path(name) / "web.yml"
        web.write_text(closed)
        lockd = Lockd(tmp_path, {"web": {"config_file": str(web)}})
        try:
            assert _status(lockd) == 401
            web.write_text("{}")
            os.kill(_exporter(lockd), signal.SIGKILL)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not any("it no longer has basic_auth_users" in line for line in lockd.log):
                assert time.monotonic() < deadline, lockd.log
                time.sleep(0.05)
            web.write_text(closed)
            assert _status(lockd) == 401
        finally:
            lockd.stop()


def _exporter(lockd: Lockd) -> int:
    """Return the process id of the exporter."""
    (pid,) = (pid for pid, command in children_of(lockd.process.pid).items() if "lockd.export" in command)
    return pid


def _status(lockd: Lockd) -> int:
    """Return the HTTP status of a request without a password, once the exporter answers."""
    connection = http.client.HTTPConnection(lockd.address, timeout=60)
    connection.request("GET", "/metrics")
    return connection.getresponse().status


def test_what_the_sampler_takes_to_answer_is_not_its_own() -> None:
    """Less than half of the CPU time of answers counts as the sampler's in lockd_cpu_ratio.

    This holds even if the sampler does nothing but answer for a second.
    """
    manifest, fds = run_loader(load_settings(read_text(Config, "", "test")))
    sampler = Sampler(manifest, fds, SamplerSettings())
    try:
        sampler.tick()
        time.sleep(JUDGE_SECONDS)
        sampler.tick()
        began, used = time.monotonic(), time.process_time()
        while time.monotonic() < began + JUDGE_SECONDS or time.process_time() < used + 0.2:
            sampler.metrics()
            sampler.details()
        sampler.tick()
        seconds, used = time.monotonic() - began, time.process_time() - used
        told = _share_told(sampler) * seconds * (os.cpu_count() or 1)
    finally:
        sampler.close()
        for fd in fds:
            os.close(fd)
    assert told < used / 2


def _share_told(sampler: Sampler) -> float:
    head, arrays = unpack(memoryview(sampler.metrics()))
    (labels,) = (each["labels"] for each in head["metrics"] if each["name"] == "lockd_cpu_ratio")
    return arrays["lockd_cpu_ratio"][labels.index(["sampler"])]
