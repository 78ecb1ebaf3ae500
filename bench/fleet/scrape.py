"""The cost for one Prometheus of scraping a fleet and evaluating lockd's rules on it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.cost import cpu_seconds
from bench.fleet.server import Prometheus, disk, running
from bench.host import KILLED_WITH_US, end, say
from bench.services import ROOT

RULES = ROOT / "deploy/prometheus"
LEAST_AVAILABLE = 2 << 30
"""The least available memory of the host, in bytes. The bench ends before less is left."""


class NoMemory(RuntimeError):
    """The host has too little memory for so many series."""


def configuration(hosts: int, port: int, interval: str = "") -> dict[str, Any]:
    """The configuration of deploy/prometheus/scrape.yml with simulated hosts as its targets.

    `interval` replaces the intervals of scrapes and evaluations if it is given.
    """
    config: dict[str, Any] = yaml.safe_load((RULES / "scrape.yml").read_text())
    config["rule_files"] = [str(RULES / name) for name in config["rule_files"]]
    job = config["scrape_configs"][0]
    job["static_configs"] = [{"targets": [f"host-{host}" for host in range(hosts)]}]
    job["relabel_configs"] = [
        {"source_labels": ["__address__"], "target_label": "instance"},
        {"source_labels": ["__address__"], "target_label": "__metrics_path__", "regex": "host-(.*)",
         "replacement": "/$1"},
        {"target_label": "__address__", "replacement": f"127.0.0.1:{port}"},
    ]  # fmt: skip
    if interval:
        config["global"] = {"evaluation_interval": interval}
        job |= {"scrape_interval": interval, "scrape_timeout": interval}
    return config


def simulated(hosts: int, recordings: Sequence[Path]) -> contextlib.AbstractContextManager[tuple[int, int]]:
    """Run the simulated hosts; the context is their port and the PID of their process."""
    return _serving("simulated_hosts", str(hosts), *map(str, recordings))


@contextlib.contextmanager
def _serving(module: str, *arguments: str) -> Iterator[tuple[int, int]]:
    """Run a module of this package that serves a port; the context is the port and the PID."""
    words = [sys.executable, "-m", f"bench.fleet.{module}", *arguments]
    process = subprocess.Popen([*KILLED_WITH_US, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout
        yield int(process.stdout.readline()), process.pid
    finally:
        end(process)


@dataclass
class Figures:
    """The figures of one run. Rates are means over the second half of the run, and memory is in bytes."""

    hosts: int
    minutes: float
    scraped: int
    """The number of hosts whose last scrape succeeded."""
    series: int
    new_series: float
    """New series per second, once all hosts are known."""
    samples: float
    """Samples stored per second, those of recording rules included."""
    scrape_seconds: list[float]
    """The duration of a scrape of one host, in seconds: the median and the 99th percentile."""
    interval_seconds: float
    """The 99th percentile of the time between two scrapes of a host, in seconds."""
    processors: float
    """The number of processors that Prometheus kept busy."""
    simulation: float
    """The number of processors that the simulated hosts kept busy."""
    resident: int
    heap: int
    """Bytes of allocated heap objects."""
    log_bytes: float
    """Growth of the write-ahead log, in bytes per second."""
    chunk_bytes: float
    """Bytes per sample in the chunks of a block."""
    index_bytes: float
    """Bytes per series in the index of a block."""
    groups: dict[str, dict[str, float]]
    """The seconds of the last evaluation of each rule group, and its number of missed evaluations."""
    rules: dict[str, float]
    """The longest evaluation of each recording rule, in seconds."""
    alerts: int
    """The number of alerts that were firing or pending."""


@contextlib.contextmanager
def measure(hosts: int, recordings: Sequence[Path], minutes: float) -> Iterator[tuple[Prometheus, Figures]]:
    """Scrape simulated hosts for `minutes`; the context is the running Prometheus and the figures."""
    with contextlib.ExitStack() as ends:
        place = Path(
            ends.enter_context(tempfile.TemporaryDirectory(prefix="lockd-bench-fleet-", dir="/var/tmp"))
        )
        port, pid = ends.enter_context(simulated(hosts, recordings))
        config = configuration(hosts, port)
        server = ends.enter_context(running(place, config, "--web.enable-admin-api"))
        say(f"scraping {hosts} hosts for {minutes:g} min")
        _wait(minutes * 60 / 2)
        before, began, simulation = server.own(), time.monotonic(), cpu_seconds(pid)
        logged, taken = disk(server.data / "wal"), server.recording_rules()
        while time.monotonic() < began + minutes * 60 / 2:
            _wait(min(15.0, began + minutes * 60 / 2 - time.monotonic()))
            for name, seconds in server.recording_rules().items():
                taken[name] = max(seconds, taken.get(name, 0.0))
        after, seconds = server.own(), time.monotonic() - began
        simulation = (cpu_seconds(pid) - simulation) / seconds
        log_bytes = (disk(server.data / "wal") - logged) / seconds
        now = time.time()
        yield (
            server,
            Figures(
                hosts=hosts,
                minutes=minutes,
                scraped=server.instant('up{job="lockd"} == 1', now).rows,
                series=int(_one(after, "prometheus_tsdb_head_series")),
                new_series=_grown(before, after, "prometheus_tsdb_head_series_created_total") / seconds,
                samples=_grown(before, after, "prometheus_tsdb_head_samples_appended_total") / seconds,
                scrape_seconds=[
                    server.value(f'quantile({share}, scrape_duration_seconds{{job="lockd"}})')
                    for share in (0.5, 0.99)
                ],
                interval_seconds=after["prometheus_target_interval_length_seconds"][("15s", "0.99")],
                processors=_grown(before, after, "process_cpu_seconds_total") / seconds,
                simulation=simulation,
                resident=int(_one(after, "process_resident_memory_bytes")),
                heap=int(_one(after, "go_memstats_heap_alloc_bytes")),
                log_bytes=log_bytes,
                **_stored(server),
                groups=_groups(after),
                rules=taken,
                alerts=server.instant("ALERTS", now).rows,
            ),
        )


@dataclass
class AgentFigures:
    """The figures of a Prometheus in agent mode, which forwards all samples.

    Rates are means over the second half of the run, and memory is in bytes.
    """

    hosts: int
    minutes: float
    series: int
    samples: float
    """Samples sent per second."""
    pending: float
    """The number of samples that wait to be sent at the end of the run."""
    sent_bytes: float
    """Bytes sent per second."""
    processors: float
    resident: int
    log_bytes: int
    """The size of the agent's data directory at the end of the run, in bytes."""


def measure_agent(hosts: int, recordings: Sequence[Path], minutes: float) -> AgentFigures:
    """Scrape simulated hosts for `minutes`, and send the samples to a server that discards them."""
    with contextlib.ExitStack() as ends:
        place = ends.enter_context(tempfile.TemporaryDirectory(prefix="lockd-bench-fleet-", dir="/var/tmp"))
        port, _ = ends.enter_context(simulated(hosts, recordings))
        sink, _ = ends.enter_context(_serving("sink"))
        config = configuration(hosts, port)
        del config["rule_files"]
        config["remote_write"] = [{"url": f"http://127.0.0.1:{sink}/write"}]
        option = "--enable-feature=agent"
        server = ends.enter_context(running(Path(place), config, option, storage="agent"))
        say(f"scraping {hosts} hosts for {minutes:g} min in agent mode")
        _wait(minutes * 60 / 2)
        before, began = server.own(), time.monotonic()
        _wait(minutes * 60 / 2)
        after, seconds = server.own(), time.monotonic() - began
        return AgentFigures(
            hosts=hosts,
            minutes=minutes,
            series=int(_one(after, "prometheus_agent_active_series")),
            samples=_grown(before, after, "prometheus_remote_storage_samples_total") / seconds,
            pending=_one(after, "prometheus_remote_storage_samples_pending"),
            sent_bytes=_grown(before, after, "prometheus_remote_storage_bytes_total") / seconds,
            processors=_grown(before, after, "process_cpu_seconds_total") / seconds,
            resident=int(_one(after, "process_resident_memory_bytes")),
            log_bytes=disk(server.data),
        )


def _wait(seconds: float) -> None:
    end_of_it = time.monotonic() + seconds
    while (left := end_of_it - time.monotonic()) > 0:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) << 10
        if available < LEAST_AVAILABLE:
            raise NoMemory(f"{available >> 20} MB of memory are left; {LEAST_AVAILABLE >> 20} MB must be")
        time.sleep(min(left, 1.0))


def _one(own: dict[str, dict[tuple[str, ...], float]], name: str) -> float:
    return sum(own[name].values())


def _grown(
    before: dict[str, dict[tuple[str, ...], float]], after: dict[str, dict[tuple[str, ...], float]], name: str
) -> float:
    return _one(after, name) - _one(before, name)


def _groups(own: dict[str, dict[tuple[str, ...], float]]) -> dict[str, dict[str, float]]:
    """The seconds of the last evaluation of each rule group, and its number of missed evaluations."""
    taken = own["prometheus_rule_group_last_duration_seconds"]
    missed = own["prometheus_rule_group_iterations_missed_total"]
    return {
        group.rpartition(";")[2]: {"seconds": seconds, "missed": missed[(group,)]}
        for (group,), seconds in taken.items()
    }


def _stored(server: Prometheus) -> dict[str, float]:
    """The bytes that a sample and a series take on the disk once they are in a block."""
    blocks = server.snapshot()
    metas = [json.loads(path.read_text())["stats"] for path in blocks.glob("*/meta.json")]
    chunks = sum(disk(path) for path in blocks.glob("*/chunks"))
    indexes = sum(path.stat().st_size for path in blocks.glob("*/index"))
    return {
        "chunk_bytes": chunks / sum(meta["numSamples"] for meta in metas),
        "index_bytes": indexes / sum(meta["numSeries"] for meta in metas),
    }
