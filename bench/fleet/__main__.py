"""Measure what a fleet of lockd daemons costs one Prometheus, and how long its dashboards take.

`sudo make fleet` writes bench/build/fleet.json and bench/build/fleet.md. The bench has four phases:

- record: real daemons run beside real services on a host that gets busier, and their scrapes are recorded.
- scrape: a real Prometheus scrapes simulated hosts that replay the recordings, and evaluates lockd's rules.
- agent: a Prometheus in agent mode scrapes the simulated hosts and forwards the samples.
- ask: a week of 1, 100 and 1,000 hosts is written into the storage of a Prometheus, which then answers
  every query of every panel.

Each phase leaves its figures in bench/build/fleet, so that it can be run alone. The report has all figures
that are there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from bench import results
from bench.fleet import ask, history, panels, record, report, scrape, server
from bench.fleet.history import CLUSTERS, HOST, Fleet
from bench.fleet.recording import Recording
from bench.host import say
from bench.services import ROOT
from tests.support.watch_files import BOARDS

KEPT = results.BUILD / "fleet"
SETTLE, STEP, SCRAPES = 30.0, 15, 5
"""Seconds that a stage runs before it is recorded, seconds between scrapes, and the number of scrapes."""
RUNS = ((100, 10_000), (1000, 2_000))
"""The number of hosts and their `series.max`, for each run of the phase scrape."""
MINUTES = 6.0
"""The length of each run of the phases scrape and agent, in minutes."""
LIVE_HOURS = 1 / 12
"""The time range, in hours, of queries to a Prometheus that scrapes at the same time."""
TYPICAL = "database"
"""The recorded load that every host of the generated week has."""
LONG = 30.0
"""The most seconds that the queries of a dashboard may take one by one to be sent all at once as well."""


def recorded(is_quick: bool) -> None:
    subprocess.run(["make", "-s", "-C", ROOT / "tests/workloads"], check=True)
    record.record(KEPT, *((5.0, 3, 3) if is_quick else (SETTLE, STEP, SCRAPES)))
    found = {}
    for most in record.MAXIMA:
        for stage in record.STAGES:
            one = Recording.load(record.path(KEPT, stage.name, most))
            found[f"{stage.name}-{most}"] = {
                "stage": stage.name,
                "of ten": stage.hosts,
                "series.max": most,
                "lines": one.lines,
                "bytes": len(one.exposition(0)),
                "new series an hour": one.churn(),
                "families": report.families(one),
            }
    keep("record", found)


def scraped(runs: list[tuple[int, int]], minutes: float) -> None:
    for hosts, most in runs:
        recordings = record.paths(KEPT, most)
        with scrape.measure(hosts, recordings, minutes) as (prometheus, figures):
            say("asking it while it scrapes")
            fleet = Fleet(Recording.load(record.path(KEPT, TYPICAL, most)))
            crowded = f"host-{len(recordings) - 1}"
            asked = {
                name: board(prometheus, name, chosen, time.time(), LIVE_HOURS)
                for name, chosen in fleet_of(fleet, ".*", crowded).items()
            }
        keep(f"scrape-{hosts}-{most}", {"series.max": most, **asdict(figures), "asked": asked})


def agent(runs: list[tuple[int, int]], minutes: float) -> None:
    hosts, most = runs[-1]
    figures = scrape.measure_agent(hosts, record.paths(KEPT, most), minutes)
    keep("agent", {"series.max": most, **asdict(figures)})


def asked(clusters: list[str], names: list[str], ranges: list[float]) -> None:
    place = KEPT / "history"
    recording = record.path(KEPT, TYPICAL, record.MAXIMA[0])
    told_in = place / "told.json"
    if not told_in.exists():
        say("writing a week of the fleets")
        shutil.rmtree(place, ignore_errors=True)
        told_in.write_text(json.dumps(history.make(place / "data", recording)))
    told = json.loads(told_in.read_text())
    keep("week", told)
    fleet = Fleet(Recording.load(recording))
    # Prometheus must neither delete nor compact the generated blocks.
    options = ("--storage.tsdb.retention.time=10y", "--storage.tsdb.max-block-duration=2h")
    with server.running(place, {"scrape_configs": []}, *options) as prometheus:
        for name in names:
            for cluster in clusters:
                for hours in ranges:
                    say(f"{name} of {CLUSTERS[cluster]} hosts over {hours:g} h")
                    chosen = fleet_of(fleet, cluster, HOST)[name]
                    found = board(prometheus, name, chosen, told["end"], hours)
                    kept_in = f"ask-{CLUSTERS[cluster]}-{hours:g}"
                    keep(kept_in, {**kept().get(kept_in, {}), name: found})


def fleet_of(fleet: Fleet, cluster: str, host: str) -> dict[str, dict[str, str]]:
    """The chosen values of the variables of each dashboard."""
    everywhere = {"cluster": cluster, "job": "lockd"}
    return {
        "lockd-fleet": everywhere,
        "lockd-host": {**everywhere, "instance": host},
        "lockd-service": {**everywhere, "unit": fleet.unit},
        "lockd-lock": {**everywhere, "lock": fleet.lock},
    }


def board(
    prometheus: server.Prometheus, name: str, chosen: Mapping[str, str], end: float, hours: float
) -> dict[str, Any]:
    """The cost of each query of a dashboard, and the seconds for all of them sent at once.

    The latter is None if the queries take more than LONG seconds one by one.
    """
    queries = [query for query in panels.queries() if query.board == name]
    answers = ask.one_by_one(prometheus, queries, chosen, end, hours)
    is_long = sum(answer.seconds for answer in answers) > LONG
    return {
        "all": None if is_long else ask.whole_board(prometheus, queries, chosen, end, hours),
        "queries": [
            {"panel": query.name, "row": query.row, **asdict(answer)}
            for query, answer in zip(queries, answers, strict=True)
        ],
    }


def keep(name: str, figures: Any) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def kept() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(KEPT.glob("*.json"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few hosts, to see that all works")
    parser.add_argument("--phases", default="record,scrape,agent,ask", help="default: %(default)s")
    parser.add_argument("--runs", help="of scrape: HOSTS:SERIES_MAX, with commas between")
    parser.add_argument("--minutes", type=float, help=f"of each run of scrape; default: {MINUTES:g}")
    parser.add_argument("--clusters", default=",".join(CLUSTERS), help="of ask; default: %(default)s")
    parser.add_argument("--boards", default=",".join(BOARDS), help="of ask; default: %(default)s")
    parser.add_argument("--hours", default="1,168", help="of ask, that dashboards show; default: %(default)s")
    args = parser.parse_args()
    runs = list(RUNS)
    if args.quick:
        runs, CLUSTERS["hundred"], CLUSTERS["thousand"] = [(10, 10_000), (20, 2_000)], 2, 4
    if args.runs:
        runs = [
            (int(hosts), int(most)) for hosts, _, most in (one.partition(":") for one in args.runs.split(","))
        ]
    ranges = [float(hours) for hours in args.hours.split(",")]
    minutes = args.minutes or (2.0 if args.quick else MINUTES)
    phases: dict[str, Callable[[], None]] = {
        "record": lambda: recorded(args.quick),
        "scrape": lambda: scraped(runs, minutes),
        "agent": lambda: agent(runs, minutes),
        "ask": lambda: asked(args.clusters.split(","), sorted(args.boards.split(",")), ranges),
    }
    names = args.phases.split(",")
    if unknown := {*names} - {*phases}:
        parser.error(f"no such phase: {', '.join(sorted(unknown))}; there are {', '.join(phases)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    host = results.host()
    for name in names:
        phases[name]()
    figures = kept()
    text = report.text(host, figures)
    results.write("fleet", {"host": host, **figures}, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
