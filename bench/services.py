"""Run lockd beside many real services, and check what a Prometheus has seen of it.

`sudo make services` writes bench/build/services.json and .md, and exits with 1 if the run deviates from what
is expected (failures()).

The daemon runs with config/lockd.yaml, and Prometheus with the scrape configuration and alerts that come with
lockd. In the quiet phase (`--minutes`) no service waits for a lock for long, so no alert on waits may fire.
Then true cases run for some minutes: workloads with a deadlock or with long waits, for each of which alerts
must fire. All services use loopback or unix sockets and a temporary directory. Each is in a cgroup of its own
if there is a unified cgroup hierarchy.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench import results
from bench.cost import memory, pids_of
from bench.database import database
from bench.host import KILLED_WITH_US, Host, free_port, get, say
from bench.prometheus import STEP, Prometheus
from tests.needs import found, libraries
from tests.support.lockd_process import CHECKOUT, Lockd

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "bench/programs"
NOBODY = ("--reuid", "nobody", "--regid", "nogroup", "--clear-groups")
SERIES_SECONDS = 60.0
"""Seconds after its start from which on a service should have series of its own."""
SETTLED_MINUTES = 30.0
"""Minutes after which memory should be flat. In short runs it is a quarter of the time."""
GROWTH = 0.05
"""The largest growth of memory, as a share, that still counts as flat in the rest of the time."""
LEAST_AT_LEVEL_0 = 0.95
CYCLE_MINUTES = 15.0
FULL_SPEED = 1 / 5
"""The share of each cycle in which the database is loaded at full speed."""
DATABASE_RATE, DATABASE_THREADS = 15, 32
LOG_LINES = 20
SHORT_COMMANDS = 300
"""The number of different names of the short processes."""
FILTERS = ("sort", "tac", "rev", "nl", "sed p", "cut -c2-", "tr 1 2", "uniq -c", "awk 1", "grep -c .", "wc")
COUNTED = r'__name__=~"lockd_(futex|offcpu|kernel)_.*", __name__!~".*_bucket"'


@dataclass(frozen=True)
class Service:
    """A service. `start` starts it in the unit of its name, and its clients in other units."""

    name: str
    comm: str
    start: Callable[[Host], None]


def redis(host: Host, unit: str, threads: int) -> Path:
    """Start a server with this number of threads for the sockets of its clients; return its own socket."""
    directory = host.make(unit)
    program, unix = directory / "redis-server", directory / "socket"
    program.symlink_to(shutil.which("redis-check-rdb") or "")  # under any other name it is the server
    options = {"port": 0, "unixsocket": unix, "io-threads": threads, "save": "", "dir": directory}
    host.serve(unit, program, *(word for name, value in options.items() for word in (f"--{name}", value)))
    host.until(unit, unix.exists)
    return unix


def redis_idle(host: Host) -> None:
    redis(host, "redis-idle", 4)


def redis_used(host: Host) -> None:
    unix = redis(host, "redis", 2)
    load = ("redis-benchmark", "-s", unix, "-c", 20, "-n", 20_000, "-t", "set,get", "--csv")
    host.every(60, "redis-benchmark", lambda: host.run("clients", *load))


def python(host: Host) -> None:
    host.workload("idle-python", "/usr/bin/python3", ROOT / "tests/programs/idle.py", 100)


def postgresql(host: Host) -> None:
    directory = host.make("postgresql")
    shutil.chown(directory, "nobody")
    environment = {**libraries(), "PGHOST": str(directory), "PGUSER": "lockd", "PGDATABASE": "postgres"}
    how: dict[str, Any] = {"user": NOBODY, "env": environment}

    data = directory / "data"
    host.run("postgresql", found("initdb"), "-A", "trust", "-U", "lockd", "-D", data, **how)
    options = ("-c", "listen_addresses=", "-c", "fsync=off", "-k", directory)
    host.serve("postgresql", found("postgres"), "-D", data, *options, **how)
    host.until("postgresql", (directory / ".s.PGSQL.5432").exists)
    pgbench = found("pgbench")
    host.run("clients", pgbench, "-i", "-q", "-s", 5, **how)
    load = ("-c", 8, "--rate", 30, "-T", 600)
    host.every(1, "pgbench", lambda: host.run("clients", pgbench, *load, **how))


def mariadb(host: Host, cycle_seconds: float) -> None:
    """Start a database. Its load is at full speed at the beginning of each cycle, and then at a low rate."""
    unix = host.directory / "mariadb.socket"
    server = host.ends.enter_context(database(unix))
    host.place("mariadb", server.pid)
    host.processes.append(("mariadb", server))
    host.run("clients", "mariadb", "--no-defaults", f"--socket={unix}", "-e", "CREATE DATABASE sbtest")
    load = ["sysbench", "oltp_read_write", f"--mysql-socket={unix}", "--mysql-user=root", "--tables=4"]
    load += ["--table-size=10000", f"--threads={DATABASE_THREADS}"]
    host.run("clients", *load, "prepare")

    def use() -> None:
        host.run("clients", *load, f"--time={cycle_seconds * FULL_SPEED:.0f}", "run")
        rest = f"--time={cycle_seconds * (1 - FULL_SPEED):.0f}"
        host.run("clients", *load, rest, f"--rate={DATABASE_RATE}", "run")

    host.every(1, "sysbench", use)


def java(host: Host) -> None:
    host.serve("java", "java", "-Xmx128m", PROGRAMS / "Pools.java")


def nginx(host: Host) -> None:
    directory, port = host.make("nginx"), free_port()
    (directory / "file").write_bytes(os.urandom(256 << 10))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "\n".join(f"{kind}_temp_path {directory}/{kind};" for kind in kinds)
    (directory / "nginx.conf").write_text(f"""
daemon off; user root; worker_processes 2; pid {directory}/pid; error_log stderr;
thread_pool default threads=4;
events {{}}
http {{
    access_log off; aio threads; sendfile off; output_buffers 1 64k;
    {paths}
    server {{ listen 127.0.0.1:{port}; root {directory}; }}
}}
""")
    command = (found("nginx"), "-e", "stderr", "-p", directory, "-c", directory / "nginx.conf")
    host.serve("nginx", *command, env=libraries())
    host.every(0.1, "client of nginx", lambda: get(f"http://127.0.0.1:{port}/file"))


def memcached(host: Host) -> None:
    unix = host.directory / "memcached.socket"
    command = (found("memcached"), "-t", 4, "-u", "root", "-s", unix)
    host.serve("memcached", *command, env=libraries())
    host.until("memcached", unix.exists)

    def use() -> None:
        with socket.socket(socket.AF_UNIX) as client, client.makefile("rwb") as stream:
            client.connect(str(unix))
            for number in range(20):
                stream.write(b"set key%d 0 0 5\r\nvalue\r\nget key%d\r\n" % (number, number))
                stream.flush()
                answer = [stream.readline() for _ in range(4)]
                if answer[2] != b"value\r\n":
                    raise RuntimeError(f"answered {answer}")

    host.every(0.2, "client of memcached", use)


def chromium(host: Host) -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--remote-debugging-port=0", f"--user-data-dir={host.make('chromium')}"]
    host.serve("chromium", program, *options, (PROGRAMS / "timers.html").as_uri())


def go(host: Host) -> None:
    program, address = host.directory / "go-server", f"127.0.0.1:{free_port()}"
    host.run("go-server", "go", "build", "-o", program, PROGRAMS / "served.go")
    host.serve("go-server", program, address)
    host.until("go-server", lambda: get(f"http://{address}/"))

    def use() -> None:
        client = http.client.HTTPConnection(address, timeout=30)
        with contextlib.closing(client):
            for _ in range(10):
                client.request("GET", "/used")
                client.getresponse().read()

    for _ in range(3):
        host.every(0.2, "client of go-server", use)


def noise(host: Host) -> None:
    """Do what cron and deployments do: run short processes of many names, and a build each minute."""
    directory = host.make("noise")
    for number in range(SHORT_COMMANDS):
        (directory / f"job-{number:03}").symlink_to("/usr/bin/sort")
    turn = 0

    def jobs() -> None:
        nonlocal turn
        own = [f"{directory}/job-{(turn + number) % SHORT_COMMANDS:03}" for number in range(5)]
        turn += len(own)
        pipeline = " | ".join(("seq 100", *FILTERS, *own, "sleep 0.1"))
        host.run("cron", "sh", "-c", pipeline)

    source = directory / "built.c"
    source.write_text('#include <stdio.h>\nint main(void) { return puts("built") < 0; }\n')
    host.every(2, "jobs", jobs)
    host.every(60, "build", lambda: host.run("build", "gcc", "-O2", "-o", directory / "built", source))


def services(cycle_seconds: float) -> tuple[Service, ...]:
    return (
        Service("redis-idle", "redis-server", redis_idle),
        Service("redis", "redis-server", redis_used),
        Service("idle-python", "idle-python", python),
        Service("postgresql", "postgres", postgresql),
        Service("mariadb", "mariadbd", lambda host: mariadb(host, cycle_seconds)),
        Service("java", "java", java),
        Service("nginx", "nginx", nginx),
        Service("memcached", "memcached", memcached),
        Service("chromium", "chromium", chromium),
        Service("go-server", "go-server", go),
    )


@dataclass(frozen=True)
class TrueCase:
    """A workload, the name of its process, and the alerts that must fire for it."""

    comm: str
    command: tuple[object, ...]
    alerts: tuple[str, ...]


TRUE_CASES = (
    TrueCase("deadlocked", ("deadlock", 0, 2), ("LockdDeadlock",)),
    TrueCase("holds-2s", ("mutex_handover", 10_000, 2_000_000), ("LockdLockWaitLong",)),
    TrueCase("stuck", ("stuck_mutex",), ("LockdLockWaitLong", "LockdThreadStuck")),
)


def alerts(prometheus: Prometheus, began: float, quiet: float, over: float) -> list[dict[str, Any]]:
    """The alerts that were firing or pending. Those about lockd itself have no comm."""
    found = [
        {name: labels.get(name, "") for name in ("alertname", "alertstate", "severity", "comm", "unit")}
        | {"phase": "quiet" if rows[0, 0] < quiet else "true cases"}
        | {"after": rows[0, 0] - began, "seconds": len(rows) * STEP}
        for labels, rows in prometheus.samples("ALERTS", began, over)
    ]
    return sorted(found, key=lambda alert: (alert["alertstate"], alert["after"]))


def counted(values: Any) -> float:
    """The total that a counter counted from 0 on, even if it was away for a time or began again at 0."""
    steps = np.diff(values, prepend=0)
    return float(np.where(steps < 0, values, steps).sum())


def lock_time(prometheus: Prometheus, whose: str, began: float, ended: float) -> dict[str, Any]:
    """Seconds that threads waited for locks, in all and by the names of locks that had series."""
    what = f'{{{whose}, kind=~"lock|pi"}}'
    of_all, by_name = 0.0, dict[str, float]()
    for _, rows in prometheus.samples(f"lockd_futex_blocked_seconds_sum{what}", began, ended):
        of_all += counted(rows[:, 1])
    for labels, rows in prometheus.samples(f"lockd_futex_lock_blocked_seconds_total{what}", began, ended):
        by_name[labels["lock"]] = by_name.get(labels["lock"], 0.0) + counted(rows[:, 1])
    named = sum(seconds for lock, seconds in by_name.items() if lock != "other")
    largest = dict(sorted(by_name.items(), key=lambda one: -one[1])[:8])
    return {"seconds": of_all, "named": named, "share": named / of_all if of_all else 0.0, "locks": largest}


def has_series(prometheus: Prometheus, whose: str, began: float, ended: float) -> dict[str, Any]:
    """At how many scrapes after its first minute a service had series of its own, and whether at the last."""
    began += SERIES_SECONDS
    scraped = prometheus.moments('up{job="lockd"} == 1', began, ended)
    there = prometheus.moments(f"count({{{COUNTED}, {whose}}})", began, ended)
    last = bool(there) and max(there) == max(scraped)
    return {"scrapes": len(scraped), "with": len(scraped & there), "at the end": last}


class Memory:
    """Resident bytes of each process of lockd, measured by each look()."""

    def __init__(self, daemon: Lockd) -> None:
        self._daemon, self._began = daemon, time.monotonic()
        self.by_process: dict[str, list[tuple[float, int]]] = defaultdict(list)
        """For each look(), the minutes since the beginning and the bytes."""

    def look(self) -> None:
        minutes = (time.monotonic() - self._began) / 60
        for name, pid in pids_of(self._daemon.process.pid).items():
            with contextlib.suppress(OSError):
                self.by_process[name].append((minutes, memory(pid).resident))

    def report(self, minutes: float) -> dict[str, dict[str, Any]]:
        """The memory in the first `minutes`: its means until and after it settles, and its growth then."""
        settled = min(SETTLED_MINUTES, minutes / 4)
        found = {}
        for name, looks in self.by_process.items():
            rows = np.array([look for look in looks if look[0] <= minutes])
            before, after = rows[rows[:, 0] < settled], rows[rows[:, 0] >= settled]
            if not len(after):  # in a run of a minute
                continue
            slope = float(np.polyfit(after[:, 0], after[:, 1], 1)[0]) if len(after) > 2 else 0.0
            growth = slope * (minutes - settled) / float(after[:, 1].mean())
            found[name] = {
                "MB until settled": float(before[:, 1].mean()) / 1e6 if len(before) else None,
                "MB after": float(after[:, 1].mean()) / 1e6,
                "most MB": float(rows[:, 1].max()) / 1e6,
                "MB an hour": slope * 60 / 1e6,
                "growth": growth,
                "is flat": growth < GROWTH,
            }
        return found


def wait(host: Host, seconds: float, memory: Memory, ended: dict[str, str]) -> None:
    """Wait, and every minute measure lockd's memory and note which services have ended."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        memory.look()
        for unit, process in host.processes:
            if process.poll() is not None and unit not in ended:
                ended[unit] = f"exit code {process.returncode}: {host.log(unit)[-300:]}"
                say(f"{unit} has ended: {ended[unit]}")
        time.sleep(min(left, 60.0))


def measure(chosen: Sequence[Service], minutes: float, true_minutes: float) -> dict[str, Any]:
    """Run the whole bench, and return the figures for the report."""
    with contextlib.ExitStack() as ends:
        name = ends.enter_context(tempfile.TemporaryDirectory(prefix="lockd-bench-services-", dir="/var/tmp"))
        Path(name).chmod(0o755)  # for processes of the user nobody
        host = Host(Path(name), ends)
        config = yaml.safe_load((ROOT / "config/lockd.yaml").read_text())
        daemon = Lockd(host.make("lockd"), config, (*KILLED_WITH_US, *CHECKOUT))
        ends.callback(daemon.stop)
        prometheus, began = Prometheus(host, [{"targets": [daemon.address]}]), time.time()
        memory, ended = Memory(daemon), dict[str, str]()
        if chosen:  # without services the host is to be idle
            noise(host)
        started = {}
        for service in chosen:
            say(f"starting {service.name}")
            service.start(host)
            started[service] = time.time()
        all_started = time.time()
        say(f"quiet for {minutes:g} min")
        wait(host, minutes * 60, memory, ended)
        quiet = time.time()
        say(f"true cases for {true_minutes:g} min")
        for case in TRUE_CASES:
            program, *arguments = case.command
            host.workload(case.comm, ROOT / "tests/workloads/build" / str(program), *arguments)
        wait(host, true_minutes * 60, memory, ended)
        over = time.time()
        text = daemon.get("/metrics")

        def whose(service: Service) -> str:
            unit = f', unit="{service.name}.service"' if host.units else ""
            return f'comm="{service.comm}"{unit}'

        return {
            "minutes": {"starts": (all_started - began) / 60, "quiet": minutes, "true cases": true_minutes},
            "units": host.units,
            "alerts": alerts(prometheus, began, quiet, over),
            "series": {
                service.name: {"comm": service.comm, **has_series(prometheus, whose(service), at, quiet)}
                for service, at in started.items()
            },
            "ended": ended,
            "errors": {
                what: {"count": len(all_of), "last": all_of[-1]} for what, all_of in host.errors.items()
            },
            "memory": memory.report((quiet - began) / 60),
            "resident bytes": memory.by_process,
            "lock time": {
                service.name: lock_time(prometheus, whose(service), began, quiet) for service in started
            },
            "scrapes that failed": sum(
                int((rows[:, 1] == 0).sum()) for _, rows in prometheus.samples("up", began, over)
            ),
            "scrape bytes": len(text),
            **told(prometheus, began, quiet),
            "log": [line.strip() for line in daemon.log],
        }


def told(prometheus: Prometheus, began: float, at: float) -> dict[str, Any]:
    """What lockd and Prometheus say of themselves in the quiet phase."""
    seconds = f"{at - began:.0f}s"

    def by_label(query: str) -> dict[str, float]:
        return prometheus.value(query, at)

    def last(metric: str) -> str:
        return f"last_over_time({metric}[2m])"  # the very last scrape may have failed

    levels = by_label(f"sum by (level) ({last('lockd_restraint_seconds_total')})")
    counters = {
        name: by_label(f"sum by ({labels}) ({last(name)})" + (" > 0" if labels else ""))
        for name, labels in (
            ("lockd_dropped_events_total", "map, reason"),
            ("lockd_overflow_events_total", "map"),
            ("lockd_series_overflow_total", "family"),
            ("lockd_series_retired_total", "family"),
            ("lockd_stack_misses_total", "reason"),
            ("lockd_deadlock_locks_skipped_total", ""),
            ("lockd_namer_restarts_total", ""),
            ("lockd_exporter_restarts_total", ""),
        )
    }

    def over_time(metric: str) -> dict[str, dict[str, float]]:
        functions = {"mean": "avg_over_time(", "p99": "quantile_over_time(0.99, ", "max": "max_over_time("}
        return {
            what: by_label(f"max by (part) ({function}{metric}[{seconds}]))")
            for what, function in functions.items()
        }

    job = '{job="lockd"}'
    return {
        "levels": {level: value / sum(levels.values()) for level, value in levels.items()},
        "counters": counters,
        "cpu ratio": over_time("lockd_cpu_ratio"),
        "cpu seconds": by_label(f"sum by (process) ({last('lockd_cpu_seconds_total')})"),
        "scrape seconds": over_time(f"scrape_duration_seconds{job}"),
        "scrape samples": over_time(f"scrape_samples_scraped{job}"),
        "scrapes": by_label(f"sum(count_over_time(up{job}[{seconds}]))"),
    }


def failures(found: dict[str, Any]) -> list[str]:
    """The deviations of a run from what is expected, in words; empty if there are none.

    Alerts about other units of the host are no failures, since they may be true; the report has them. Some
    alerts are about a unit and have no comm. Those about lockd itself have neither unit nor comm.
    """
    fired = [alert for alert in found["alerts"] if alert["alertstate"] == "firing"]
    true = {(name, case.comm) for case in TRUE_CASES for name in case.alerts}
    expected = {comm for _, comm in true} | {f"{case.comm}.service" for case in TRUE_CASES}
    wrong = [
        "{alertname} fired for {whom} after {after:.0f} s, for {seconds:.0f} s".format(**alert, whom=whom)
        for alert in fired
        if (whom := alert["comm"] or alert["unit"] or "lockd") not in expected
        and (not found["units"] or alert["unit"] in found["units"] or whom == "lockd")
    ]
    missing = sorted(true - {(alert["alertname"], alert["comm"]) for alert in fired})
    wrong += [f"{name} did not fire for {comm}" for name, comm in missing]
    if found["levels"].get("0", 0.0) < LEAST_AT_LEVEL_0:
        wrong.append(f"at restraint level 0 for {found['levels'].get('0', 0.0):.1%} of the time only")
    wrong += [
        f"{name} has no series at the end" for name, one in found["series"].items() if not one["at the end"]
    ]
    wrong += [f"{name} ended: {why}" for name, why in found["ended"].items()]
    if tracebacks := sum(line.startswith("Traceback") for line in found["log"]):
        wrong.append(f"{tracebacks} tracebacks in the log of lockd")
    if found["minutes"]["quiet"] >= 2 * SETTLED_MINUTES:
        wrong += [
            f"memory of the {name} grows" for name, one in found["memory"].items() if not one["is flat"]
        ]
    return wrong


def report(found: dict[str, Any], wrong: Sequence[str]) -> str:
    """The report as Markdown."""

    def listed(values: dict[str, float], shape: str = "{:,.0f}") -> str:
        return ", ".join(f"{name} {shape.format(value)}".strip() for name, value in values.items()) or "none"

    phases = ", ".join(f"{name} {minutes:.0f}" for name, minutes in found["minutes"].items())
    text = f"# lockd beside real services\n\nMinutes: {phases}.\n\n"
    text += "".join(f"- **{one}**\n" for one in wrong) or "All is as it should be.\n"
    rows: list[Sequence[object]] = [
        [f"{value:.0f} s" if isinstance(value, float | int) else value for value in alert.values()]
        for alert in found["alerts"]
    ]
    head = "alert | state | severity | comm | unit | phase | after | for"
    text += "\n## Alerts\n\n" + results.table(head, rows)
    rows = [
        (name, one["comm"], f"{one['with']} of {one['scrapes']}", "yes" if one["at the end"] else "**no**")
        for name, one in found["series"].items()
    ]
    text += "\n## Series of each service\n\n" + results.table(
        "service | comm | at scrapes | at the end", rows
    )
    rows = [("time by level of restraint", listed(found["levels"], "{:.2%}"))]
    rows += [(name, listed(values)) for name, values in found["counters"].items()]
    rows += [
        (f"lockd_cpu_ratio, {what}", listed(each, "{:.2%}")) for what, each in found["cpu ratio"].items()
    ]
    rows.append(("CPU seconds", listed(found["cpu seconds"])))
    for name, shape in (("scrape seconds", "{:.3f}"), ("scrape samples", "{:,.0f}")):
        rows += [(f"{name}, {what}", listed(each, shape)) for what, each in found[name].items()]
    rows.append(("scrape, bytes at the end", f"{found['scrape bytes']:,}"))
    rows.append(("scrapes; failed", f"{listed(found['scrapes'])}; {found['scrapes that failed']}"))
    text += "\n## lockd itself, in the quiet phase\n\n" + results.table("what | value", rows)
    rows = [
        (name, *("" if value is None else f"{value:.1f}" for key, value in one.items() if "MB" in key),
         f"{one['growth']:.1%}", "yes" if one["is flat"] else "**no**")
        for name, one in found["memory"].items()
    ]  # fmt: skip
    head = "process | MB until settled | MB after | most MB | MB an hour | growth | flat"
    text += "\n## Memory\n\n" + results.table(head, rows)
    rows = [
        (name, f"{of['seconds']:.2f}", f"{of['share']:.1%}", lock, f"{seconds:.2f}")
        for name, of in found["lock time"].items()
        for lock, seconds in of["locks"].items()
    ]
    head = "service | seconds in all | under names of locks | lock | seconds"
    text += "\n## Lock time of each service\n\n" + results.table(head, rows)
    lines = "".join(f"    {line}\n" for line in found["log"][-LOG_LINES:])
    text += f"\n## The end of lockd's log\n\n{lines}"
    if found["errors"]:
        rows = [(what, one["count"], one["last"].splitlines()[0]) for what, one in found["errors"].items()]
        text += "\n## Errors of clients\n\n" + results.table("who | errors | the last", rows)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="minutes of the quiet phase; default: %(default)g"
    )
    parser.add_argument(
        "--true-minutes", type=float, default=5.0, help="minutes of the true cases; default: %(default)g"
    )
    parser.add_argument(
        "--services",
        help="names of services, separated by commas; '' for an idle host; default: all",
    )
    args = parser.parse_args()
    every = services(min(CYCLE_MINUTES, args.minutes) * 60)
    names = [service.name for service in every]
    if args.services is not None:
        names = [name for name in args.services.split(",") if name]
    if unknown := {*names} - {service.name for service in every}:
        parser.error(f"no such service: {', '.join(sorted(unknown))}")
    chosen = [service for service in every if service.name in names]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    subprocess.run(["make", "-s", "-C", ROOT / "tests/workloads"], check=True)
    host = results.host()
    found = measure(chosen, args.minutes, args.true_minutes)
    wrong = failures(found)
    text = report(found, wrong)
    results.write("services", {"host": host, "failures": wrong, **found}, text)
    print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
