"""Tests of deploy/profiles: the profiles that servers request from lockd, and the answers that they get."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from lockd.export.detail import FILTERS, MOST_SECONDS, PROGRAMS
from lockd.export.handlers import MOST_SLOW_OF_SOURCE
from lockd.views import pprof
from lockd.views.profile import Mark, Profile, Sample, Value
from tests.needs import need

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy/profiles"
PATHS = {f"/debug/pprof/{program}" for program in PROGRAMS}
OF_GO = {"memory", "block", "goroutine", "mutex", "process_cpu"}
"""The profiles of Go's runtime that Parca and Alloy request by default."""


def seconds(text: str) -> int:
    return int(re.fullmatch(r"(\d+)s", text)[1])


def test_parca_asks_for_what_there_is_and_waits_for_it():
    config = yaml.safe_load((DEPLOY / "parca.yml").read_text())
    (job,) = config["scrape_configs"]
    profiles = job["profiling_config"]["pprof_config"]
    wanted = {name: one for name, one in profiles.items() if one["enabled"]}
    assert {one["path"] for one in wanted.values()} == PATHS
    assert all(one["path"] == f"/debug/pprof/{name}" and one["delta"] for name, one in wanted.items())
    assert set(profiles) - set(wanted) == OF_GO
    assert seconds(job["scrape_interval"]) <= MOST_SECONDS
    assert seconds(job["scrape_timeout"]) > seconds(job["scrape_interval"])  # Parca refuses it otherwise
    assert "params" not in job


def test_alloy_asks_for_what_there_is():
    text = (DEPLOY / "lockd.alloy").read_text()
    blocks = dict(re.findall(r'profile\.custom "(\w+)" \{([^}]*)\}', text))
    assert set(blocks) == set(PROGRAMS)
    for name, block in blocks.items():
        assert dict(re.findall(r"(\w+)\s*= (.*)", block)) == {
            "enabled": "true",
            "path": f'"/debug/pprof/{name}"',
            "delta": "true",
        }
    assert set(re.findall(r"profile\.(\w+) \{\s*enabled = false\s*\}", text)) == OF_GO
    assert seconds(re.search(r'scrape_interval = "(\w+)"', text)[1]) - 1 <= MOST_SECONDS
    assert not re.search(r"^\s*params\b", text, re.MULTILINE)


def test_pyroscope_drops_a_label_that_the_profiles_have():
    (rule,) = yaml.safe_load((DEPLOY / "pyroscope.yml").read_text())["limits"]["ingestion_relabeling_rules"]
    assert rule["action"] == "labeldrop"
    assert [name for name in ("comm", "unit", "kind", "lock") if re.fullmatch(rule["regex"], name)] == [
        "lock"
    ]


def test_two_servers_may_ask_at_the_same_time_and_choose_processes():
    assert 2 * len(PROGRAMS) <= MOST_SLOW_OF_SOURCE
    said = (ROOT / "docs/profiles.md").read_text()
    assert {f"__param_{name}" for name in FILTERS} == set(re.findall(r"__param_\w+", said))


def test_profiles_of_many_hosts_are_merged_by_go(tmp_path):
    """The commands in docs/profiles.md: samples of one lock add up, and two profiles can be compared."""
    go = need("go")
    values = (Value("blocked", "microseconds"), Value("waits", "count"))
    for name, (blocked, waits) in {"a": (2000, 2), "b": (3000, 1)}.items():
        frames = ("main", "pthread_mutex_lock", Mark("shop:stock"))
        sample = Sample(
            "shop", 7, 0, frames, (blocked, waits), {"unit": "shop.service", "lock": "shop:stock"}
        )
        encoded = pprof.encode(Profile("lockd futex", values, [sample], 1.7e9, 30.0), comm_is_frame=True)
        (tmp_path / f"{name}.pb.gz").write_bytes(encoded)

    def top(*words: str) -> str:
        environment = {**os.environ, "PPROF_TMPDIR": str(tmp_path)}
        command = [go, "tool", "pprof", "-top", *words]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment
        )
        (line,) = [line for line in done.stdout.splitlines() if line.endswith(" shop:stock")]
        return line.split()[0]

    assert top("-unit=us", "a.pb.gz", "b.pb.gz") == "5000us"
    assert top("-unit=us", "-diff_base=a.pb.gz", "b.pb.gz") == "1000us"
    assert top("-tagfocus=unit=shop.service", "-sample_index=waits", "a.pb.gz") == "2"


@pytest.mark.parametrize("name", ["parca.yml", "lockd.alloy", "pyroscope.yml"])
def test_the_files_are_documented(name):
    assert f"deploy/profiles/{name}" in (ROOT / "docs/profiles.md").read_text()
