"""Recordings of real lockd daemons under different loads, on one host that gets busier from stage to stage.

The services are those of bench/services.py. The last stage adds hundreds of processes and short commands.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.fleet import recording
from bench.host import KILLED_WITH_US, READY_SECONDS, Host, say
from bench.services import ROOT, noise, services
from tests.support.lockd_process import CHECKOUT, Lockd

ACCEPT = "application/openmetrics-text; version=1.0.0"
CYCLE_SECONDS = 60.0
"""Seconds of a cycle of the load on the database, which runs at full speed for a fifth of it."""
CROWD, CROWD_ROUNDS = 400, 5
"""The number of processes of the crowd, and the number of times that each of them hands its lock over."""
MAXIMA = (10_000, 2_000)
"""The values of `series.max`: the default, and one for large fleets. A lockd is recorded with each."""


@dataclass(frozen=True)
class Stage:
    """A load: the services that are started in addition to those of the stages before."""

    name: str
    hosts: int
    """The number of hosts with this load among ten hosts of the fleet."""
    starts: Sequence[Callable[[Host], object]]


def _service(name: str) -> Callable[[Host], object]:
    return next(one.start for one in services(CYCLE_SECONDS) if one.name == name)


def _crowd(host: Host) -> None:
    program = ROOT / "tests/workloads/build/many_procs"
    command = ("sh", "-c", f"printf g | {program} {CROWD} {CROWD_ROUNDS} >/dev/null")
    host.every(5, "crowd", lambda: host.run("crowd", *command))


STAGES = (
    Stage("idle", 4, [_service("redis-idle"), _service("idle-python")]),
    Stage("web", 3, [_service(name) for name in ("nginx", "memcached", "redis", "go-server")]),
    Stage("database", 2, [_service(name) for name in ("postgresql", "mariadb", "java")]),
    Stage("crowded", 1, [noise, _crowd]),
)


def path(directory: Path, stage: str, most_lines: int) -> Path:
    return directory / f"{stage}-{most_lines}.gz"


def paths(directory: Path, most_lines: int) -> list[Path]:
    """The files of ten hosts with this `series.max`, in which each load has its share of the fleet."""
    return [path(directory, stage.name, most_lines) for stage in STAGES for _ in range(stage.hosts)]


def record(directory: Path, settle: float, step: int, scrapes: int) -> None:
    """Write all recordings.

    Each stage runs for `settle` seconds and is then scraped `scrapes` times, every `step` seconds.
    """
    with contextlib.ExitStack() as ends:
        place = ends.enter_context(tempfile.TemporaryDirectory(prefix="lockd-bench-fleet-", dir="/var/tmp"))
        Path(place).chmod(0o755)  # for processes of the user nobody
        host = Host(Path(place), ends)
        config = yaml.safe_load((ROOT / "config/lockd.yaml").read_text())
        daemons = {}
        for most in MAXIMA:
            series = {"series": {**config["series"], "max": most}}
            daemon = Lockd(host.make(f"lockd-{most}"), config | series, (*KILLED_WITH_US, *CHECKOUT))
            ends.callback(daemon.stop)
            daemons[most] = daemon
        for stage in STAGES:
            say(f"recording a host that is {stage.name}")
            for start in stage.starts:
                start(host)
            time.sleep(settle)
            began, texts = time.monotonic(), {most: list[bytes]() for most in MAXIMA}
            for number in range(scrapes):
                time.sleep(max(0.0, began + number * step - time.monotonic()))
                for most, daemon in daemons.items():
                    texts[most].append(_scrape(daemon))
            for most in MAXIMA:
                recording.store(path(directory, stage.name, most), step, texts[most])


def _scrape(daemon: Lockd) -> bytes:
    request = urllib.request.Request(f"http://{daemon.address}/metrics", headers={"Accept": ACCEPT})
    with urllib.request.urlopen(request, timeout=READY_SECONDS) as answer:
        body: bytes = answer.read()
    return body
