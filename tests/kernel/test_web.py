"""What who reaches the port can do to the daemon, and what a wrong web configuration does."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from lockd_process import CHECKOUT, ROOT

from lockd.children import run_loader
from lockd.config import Config
from lockd.config_reader import read_text
from lockd.sample.cpu_budget import LOOK_SECONDS
from lockd.sample.sampler import Sampler, SamplerSettings
from lockd.service import load_settings
from lockd.snapshot import unpack


def test_a_wrong_web_configuration_ends_it_with_2(tmp_path: Path) -> None:
    web = tmp_path / "web.yml"
    web.write_text("")
    command = [*CHECKOUT, "run", "--web.listen-address=127.0.0.1:0", f"--web.config.file={web}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_what_the_sampler_takes_to_answer_is_not_its_own() -> None:
    """Of a second that goes to nothing else, hardly anything counts for what restraint looks at."""
    manifest, fds = run_loader(load_settings(read_text(Config, "", "test")))
    sampler = Sampler(manifest, fds, SamplerSettings())
    try:
        sampler.tick()
        time.sleep(LOOK_SECONDS)
        sampler.tick()
        began, used = time.monotonic(), time.process_time()
        while time.monotonic() < began + LOOK_SECONDS or time.process_time() < used + 0.2:
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
