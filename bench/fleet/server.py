"""A real Prometheus: its process, its answers to queries, and its own metrics."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.host import KILLED_WITH_US, end, free_port, get
from tests.needs import found, libraries

READY_SECONDS = 300.0
ASKED_SECONDS = 120.0
"""The timeout, in seconds, of requests for its rules and its own metrics: long, as it may be busy."""
QUERY_SECONDS = 120.0
"""The default timeout of a query in Prometheus, in seconds."""


@dataclass(frozen=True)
class Answer:
    """The answer to one query, or the error."""

    seconds: float
    rows: int
    """The number of series in the answer; 1 for a scalar."""
    samples: int
    """The number of samples that the query read."""
    error: str = ""


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str, pid: int, data: Path) -> None:
        self._url, self.pid, self.data = url, pid, data

    def instant(self, query: str, at: float) -> Answer:
        return self._timed("query", query=query, time=at)

    def range(self, query: str, begin: float, end: float, step: float) -> Answer:
        return self._timed("query_range", query=query, start=begin, end=end, step=step)

    def value(self, query: str) -> float:
        """The current value of a query that returns exactly one series."""
        (one,) = self._asked("query", query=query)["result"]
        return float(one["value"][1])

    def labels(self, selector: str) -> list[dict[str, str]]:
        """The labels of each series that the selector matches now."""
        return [one["metric"] for one in self._asked("query", query=selector)["result"]]

    def recording_rules(self) -> dict[str, float]:
        """The seconds of the last evaluation of each recording rule, by the name of the rule."""
        groups = json.loads(get(f"{self._url}/api/v1/rules?type=record", ASKED_SECONDS))["data"]["groups"]
        return {rule["name"]: rule["evaluationTime"] for group in groups for rule in group["rules"]}

    def own(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Prometheus' own metrics: for each name, the values by the values of the labels."""
        text = get(f"{self._url}/metrics", ASKED_SECONDS).decode()
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
        return found

    def snapshot(self) -> Path:
        """Write a snapshot of all samples as blocks, and return its directory."""
        request = urllib.request.Request(f"{self._url}/api/v1/admin/tsdb/snapshot", method="POST")
        with urllib.request.urlopen(request, timeout=600) as answer:
            return self.data / "snapshots" / json.load(answer)["data"]["name"]

    def _timed(self, what: str, **query: object) -> Answer:
        began = time.monotonic()
        try:
            data = self._asked(what, stats="all", **query)
        except urllib.error.HTTPError as error:
            said = json.loads(error.read())["error"]
            return Answer(time.monotonic() - began, 0, 0, said)
        except TimeoutError:
            return Answer(time.monotonic() - began, 0, 0, "no answer")
        seconds = time.monotonic() - began
        samples = data["stats"]["samples"]["totalQueryableSamples"]
        return Answer(seconds, len(data["result"]) if data["resultType"] != "scalar" else 1, samples)

    def _asked(self, what: str, **query: object) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        data: dict[str, Any] = json.loads(get(url, QUERY_SECONDS + 10))["data"]
        return data


@contextlib.contextmanager
def running(
    directory: Path, config: Mapping[str, Any], *options: str, storage: str = "tsdb"
) -> Iterator[Prometheus]:
    """Run a Prometheus with this configuration and its data in `directory`/data.

    `storage` is `tsdb`, or `agent` for agent mode.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "prometheus.yml").write_text(yaml.safe_dump(dict(config)))
    address, data = f"127.0.0.1:{free_port()}", directory / "data"
    words = [found("prometheus"), f"--config.file={directory}/prometheus.yml"]
    words += [f"--storage.{storage}.path={data}", f"--web.listen-address={address}", *options]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*KILLED_WITH_US, *words], stderr=log, env=libraries())
    try:
        prometheus = Prometheus(f"http://{address}", process.pid, data)
        deadline = time.monotonic() + READY_SECONDS
        while True:
            with contextlib.suppress(OSError):
                get(f"http://{address}/-/ready")
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Prometheus: not ready:\n{(directory / 'log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield prometheus
    finally:
        end(process)


def disk(directory: Path) -> int:
    """The bytes of all files in a directory and its subdirectories."""
    return sum(os.path.getsize(Path(root) / name) for root, _, names in os.walk(directory) for name in names)
