"""A real Prometheus: started, asked, and what it says of itself."""

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
"""That it may take to tell of itself, while it is busy."""
QUERY_SECONDS = 120.0
"""After which Prometheus gives up, by default."""


@dataclass(frozen=True)
class Answer:
    """To one query."""

    seconds: float
    rows: int
    """Series."""
    samples: int
    """That were read."""
    error: str = ""


class Prometheus:
    """One that runs."""

    def __init__(self, url: str, pid: int, data: Path) -> None:
        self._url, self.pid, self.data = url, pid, data

    def instant(self, query: str, at: float) -> Answer:
        return self._timed("query", query=query, time=at)

    def range(self, query: str, begin: float, end: float, step: float) -> Answer:
        return self._timed("query_range", query=query, start=begin, end=end, step=step)

    def value(self, query: str) -> float:
        """The one value that there is now."""
        (one,) = self._asked("query", query=query)["result"]
        return float(one["value"][1])

    def labels(self, selector: str) -> list[dict[str, str]]:
        """Of each series that there is now."""
        return [one["metric"] for one in self._asked("query", query=selector)["result"]]

    def recording_rules(self) -> dict[str, float]:
        """Seconds that the last evaluation of each recording rule took."""
        groups = json.loads(get(f"{self._url}/api/v1/rules?type=record", ASKED_SECONDS))["data"]["groups"]
        return {rule["name"]: rule["evaluationTime"] for group in groups for rule in group["rules"]}

    def own(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Its metrics: values by name and values of labels."""
        text = get(f"{self._url}/metrics", ASKED_SECONDS).decode()
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
        return found

    def snapshot(self) -> Path:
        """Write all that is in memory as blocks; where they are."""
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
    """A Prometheus with this configuration; its data is in `directory`/data. `storage`: `tsdb` or `agent`."""
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
    """Bytes of all files in it."""
    return sum(os.path.getsize(Path(root) / name) for root, _, names in os.walk(directory) for name in names)
