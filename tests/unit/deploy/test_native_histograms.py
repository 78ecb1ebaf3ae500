"""A Prometheus that converts histograms of lockd to native ones keeps the classic ones, which rules read."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.exposition import choose_encoder

from lockd.export.catalog import CATALOG
from lockd.export.exposition import Exposition
from lockd.messages import unpack
from tests.needs import libraries, need
from tests.support.exporter_process import full_block
from tests.support.watch_files import SCRAPE

FIRST_VERSION = 3
SECONDS = 60


@pytest.fixture(scope="module")
def prometheus() -> str:
    program = need("prometheus")
    said = subprocess.run(
        [program, "--version"], check=False, capture_output=True, text=True, env=libraries()
    )
    (version,) = re.findall(r"version (\d+)\.", said.stdout + said.stderr)
    if int(version) < FIRST_VERSION:
        pytest.skip(
            f"host: its Prometheus is {version}.x (Debian 12 has 2.42), and native histograms of classic ones"
            " need 3.0"
        )
    return program


@contextmanager
def exporter() -> Iterator[str]:
    """Serves what an exporter of lockd would, with every metric."""
    text = Exposition(choose_encoder("")[0], Path("/proc")).text(*unpack(memoryview(full_block())))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def scrape_job() -> dict[str, Any]:
    """Return the job of scrape.yml with the two options that its comment on native histograms gives."""
    text = SCRAPE.read_text(encoding="utf-8")
    lines = re.findall(r"^    # (\w+_histograms\w*: true)$", text, re.MULTILINE)
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert len(lines) == 2
    return {**job, **yaml.safe_load("\n".join(lines)), "scrape_interval": "1s", "scrape_timeout": "1s"}


def test_both_sorts_of_histograms_are_there_and_agree(prometheus: str, tmp_path: Path) -> None:
    with exporter() as target, ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as free:
        job = {**scrape_job(), "static_configs": [{"targets": [target]}]}
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
        url = f"127.0.0.1:{free.server_port}"
        free.server_close()
        command = [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--web.listen-address={url}"]
        command += [f"--storage.tsdb.path={tmp_path}/data", "--enable-feature=native-histograms"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=libraries()) as server:
            try:
                names = [name for name, metric in CATALOG.items() if metric.kind == "histogram"]
                until(url, f"histogram_count({names[-1]})")
                for name in names:
                    native = asked(url, f"sum(histogram_count({name}))")
                    assert native == asked(url, f"sum({name}_count)") != [], name
                    native = asked(url, f"histogram_quantile(0.5, sum({name}))")
                    assert native == asked(url, f"histogram_quantile(0.5, sum by (le) ({name}_bucket))"), name
            finally:
                server.terminate()


def asked(url: str, query: str) -> list[str]:
    with urllib.request.urlopen(
        f"http://{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    ) as answer:
        return [one["value"][1] for one in json.load(answer)["data"]["result"]]


def until(url: str, query: str) -> None:
    """Waits until the query has a result."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if asked(url, query):
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"no result of {query} in {SECONDS} s")
