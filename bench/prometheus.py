"""A real Prometheus that scrapes lockd, and a real Alertmanager with receivers of its notifications.

Prometheus and Alertmanager run with the configuration in deploy/prometheus.
"""

from __future__ import annotations

import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.host import READY_SECONDS, Host, free_port, get
from tests.needs import SERVERS, found, libraries

DEPLOYED = Path(__file__).resolve().parents[1] / "deploy/prometheus"
RULES = (DEPLOYED / "lockd.rules.yml", DEPLOYED / "lockd.recording.yml")
STEP = 15
"""Seconds between scrapes, as in scrape.yml."""
DURATION = re.compile(r"(?P<before>\[|offset |:(?=\d+[smh]\]))(?P<number>\d+)(?P<unit>[smh])\b")
SECONDS = {"s": 1, "m": 60, "h": 3600}
LONG_SECONDS = 300
"""The least duration, in seconds, that makes faster() divide the durations of an expression."""
HOURS_SECONDS, HOURS_FASTER = 6 * 3600, 2
"""The least duration, in seconds, that makes faster() divide by so many times the factor. A sum over six
hours is reached after hours, which would be longer than faults last. With more than twice the factor, the
slow alert about an objective would come before the fast one."""
TEMPLATES = ("/usr/share", SERVERS / "usr/share/prometheus")
"""The directory where Debian's Alertmanager expects its templates, and the path where they were unpacked."""
WITH_TEMPLATES = (
    "unshare", "--mount", "sh", "-ec",
    'test -d $0/prometheus/alertmanager || { mount -t tmpfs none $0; cp -r "$1" $0; }; shift; exec "$@"',
    *map(str, TEMPLATES),
)  # fmt: skip
"""The prefix of a command that runs an Alertmanager that is not installed, with its templates in place."""
GROUP_INTERVAL = "5m"
"""Alertmanager's default: the pause between notifications about one group of alerts."""


class Prometheus:
    """A running Prometheus that scrapes lockd, and queries of what it stored.

    `targets` is the content of `static_configs`. `alertmanager` is the address of an Alertmanager, or empty.
    """

    def __init__(
        self,
        host: Host,
        targets: Sequence[Mapping[str, Any]],
        rules: Sequence[Path] = RULES,
        step: float = STEP,
        alertmanager: str = "",
    ) -> None:
        directory = host.make("prometheus")
        config = yaml.safe_load((DEPLOYED / "scrape.yml").read_text())
        config["global"] = {"evaluation_interval": f"{step:g}s"}
        config["rule_files"] = [str(path) for path in rules]
        (job,) = config["scrape_configs"]
        job["scrape_interval"] = f"{step:g}s"
        job["scrape_timeout"] = f"{min(step, 10):g}s"
        job["static_configs"] = list(targets)
        if alertmanager:
            config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}"
        options = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
        options += [f"--web.listen-address={address}"]
        host.serve("prometheus", found("prometheus"), *options, env=libraries())
        host.until("prometheus", lambda: get(f"{self._url}/-/ready"))

    def asked(self, what: str, **query: object) -> Any:
        """The data that the HTTP API returns for /api/v1/WHAT."""
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(query, doseq=True)}"
        return json.loads(get(url, READY_SECONDS))["data"]

    def rows(self, query: str, **when: object) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.asked("query", query=query, **when)["result"]
        return found

    def value(self, query: str, at: float) -> dict[str, float]:
        """The values of a query at a time, by the values of the labels in the result."""
        found = {
            ", ".join(label for _, label in sorted(one["metric"].items())): one["value"]
            for one in self.rows(query, time=at)
        }
        return {labels: float(value) for labels, (_, value) in sorted(found.items())}

    def samples(self, selector: str, began: float, ended: float) -> Iterator[tuple[dict[str, str], Any]]:
        """The labels of each series, and its samples between two times as rows of time and value."""
        for one in self.rows(f"{selector}[{ended - began:.0f}s]", time=ended):
            yield one["metric"], np.array(one["values"], dtype=float)

    def moments(self, query: str, began: float, ended: float) -> set[float]:
        """The times, STEP apart, at which the query returned something."""
        found = self.asked("query_range", query=query, start=began, end=ended, step=STEP)["result"]
        return {float(at) for one in found for at, _ in one["values"]}


def faster(expr: str, factor: int) -> str:
    """The expression, with all ranges and offsets divided if one of them is LONG_SECONDS or more.

    With `factor` 1 all is as it was.
    """
    longest = max(map(_seconds, DURATION.finditer(expr)), default=0)
    if longest < LONG_SECONDS:
        return expr
    if longest >= HOURS_SECONDS and factor > 1:
        factor *= HOURS_FASTER
    return DURATION.sub(lambda match: f"{match['before']}{max(_seconds(match) // factor, 1)}s", expr)


def faster_rules(path: Path, factor: int) -> dict[str, Any]:
    """The rules of a file. In rules with a duration of LONG_SECONDS or more all durations are divided."""
    rules: dict[str, Any] = yaml.safe_load(path.read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        divided = faster(f"[{rule.get('for', '0s')}] {rule['expr']}", factor)
        duration, _, rule["expr"] = divided.partition("] ")
        if "for" in rule:
            rule["for"] = duration.removeprefix("[")
    return rules


def _seconds(duration: re.Match[str]) -> int:
    return int(duration["number"]) * SECONDS[duration["unit"]]


@dataclass(frozen=True)
class Notified:
    """One alert in one notification."""

    at: float
    receiver: str
    is_firing: bool
    labels: Mapping[str, str]
    began: str


class Alertmanager:
    """A running Alertmanager with alertmanager.yml. `notified` has all alerts sent to its receivers."""

    def __init__(self, host: Host, factor: int, now: Callable[[], float]) -> None:
        """Start Alertmanager and the receivers. `now()` gives the time of a notification."""
        self.notified: list[Notified] = []
        self.notifications = 0
        config = yaml.safe_load((DEPLOYED / "alertmanager.yml").read_text())
        config["route"]["group_interval"] = faster(f"[{GROUP_INTERVAL}]", factor)[1:-1]
        server = self._receive(now)
        host.ends.callback(server.shutdown)
        for receiver in config["receivers"]:
            url = f"http://127.0.0.1:{server.server_port}/{receiver['name']}"
            receiver["webhook_configs"] = [{"url": url, "send_resolved": True}]
        directory = host.make("alertmanager")
        (directory / "alertmanager.yml").write_text(yaml.safe_dump(config))
        self.address = f"127.0.0.1:{free_port()}"
        options = [f"--config.file={directory}/alertmanager.yml", f"--storage.path={directory}/data"]
        options += [f"--web.listen-address={self.address}", "--cluster.listen-address="]
        command = (*WITH_TEMPLATES, found("prometheus-alertmanager"), *options)
        host.serve("alertmanager", *command, env=libraries())
        host.until("alertmanager", lambda: get(f"http://{self.address}/-/ready"))

    def _receive(self, now: Callable[[], float]) -> ThreadingHTTPServer:
        alertmanager = self

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                alertmanager.notifications += 1
                for alert in said["alerts"]:
                    is_firing = alert["status"] == "firing"
                    receiver, labels = self.path[1:], alert["labels"]
                    one = Notified(now(), receiver, is_firing, labels, alert["startsAt"])
                    alertmanager.notified.append(one)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server
