"""Stage a fault for every alert, and check that the alert fires, is sent once, and ends.

`sudo make alerts` writes bench/build/alerts.md, expressions.md and runbooks.md. It exits with 1 if something
is not as expected.

Several daemons, each of which counts only the processes staged for it, stand for as many hosts. A real
Prometheus scrapes them and evaluates the rules that come with lockd. A real Alertmanager with
alertmanager.yml notifies receivers in this process. At first there is no fault, and no alert may fire. Then
all faults are present at the same time. Then all faults end, and all alerts must end.

If a rule has a duration of five minutes or more, all of its durations are divided by `--faster`, or by twice
that if it has one of six hours or more. So is Alertmanager's group_interval. Scrapes are then up to three
times as frequent, so that the shorter ranges still have samples. All else is as committed.

While the faults last, every expression of the dashboards, rules and documents is queried
(bench/expressions.py), and the commands of each runbook are run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench import results
from bench.expressions import Expressions
from bench.host import Host, say
from bench.prometheus import RULES, STEP, Alertmanager, Notified, Prometheus, faster_rules
from bench.staged import BURN, CRITICAL, Alert, Daemon, Fault, Stage, faults
from tests.support.watch_files import OBJECTIVES, RUNBOOKS, commands

ROOT = Path(__file__).resolve().parents[1]
LEAST_STEP = 5
"""The least number of seconds between scrapes, and between evaluations of the rules."""
HEALTHY_SECONDS = 30.0
MOST_SECONDS = 7200.0
"""The longest wait, in seconds, for a fault to begin, for all alerts to be sent, or for all alerts to end.

It holds for the rules as committed, and is divided by `--faster`.
"""
GROUP_WAIT, GROUP_INTERVAL_SECONDS = 30.0, 300.0
"""Seconds for which Alertmanager waits before the first and before each further notification of a group."""
LOOK_SECONDS = 40.0
INTO_FILE = re.compile(">| -so ")
NO_SERVICE = ("systemctl", "journalctl")
"""Commands about lockd.service, which does not exist here. The report has the log of the daemon instead."""


def alert_of(labels: Mapping[str, str]) -> Alert:
    whom = next(filter(None, map(labels.get, ("comm", "unit", "lock", "instance", "job"))), "")
    return Alert(labels["alertname"], labels["severity"], whom)


@dataclass
class Seen:
    """The history of an alert, in seconds since the first fault."""

    fired: float | None = None
    firing_until: float | None = None
    """The last time at which Prometheus reported the alert as firing."""
    sent: list[Notified] = field(default_factory=list)

    @property
    def is_firing(self) -> bool:
        """Whether the last notification of any label set of the alert says that it fires."""
        last = {tuple(sorted(one.labels.items())): one.is_firing for one in self.sent}
        return any(last.values())

    @property
    def ended(self) -> float | None:
        return None if self.is_firing or not self.sent else self.sent[-1].at


class Clock:
    """A clock that counts the seconds since the first fault."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._began = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._began


class Watch:
    """An observer of the alerts that fire and are sent, which also queries all expressions periodically."""

    def __init__(
        self, prometheus: Prometheus, alertmanager: Alertmanager, expressions: Expressions, now: Clock
    ) -> None:
        self._prometheus, self._alertmanager, self._now = prometheus, alertmanager, now
        self._expressions, self._looked = expressions, 0.0
        self.seen: dict[Alert, Seen] = defaultdict(Seen)
        self._read = 0

    def until(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Look once a second until `is_over` returns true, but for at most `seconds`."""
        end = self._now() + seconds
        while not is_over() and self._now() < end:
            self.look()
            if self._now() - self._looked > LOOK_SECONDS:
                self._expressions.look()
                self._looked = self._now()
            time.sleep(1)

    def is_sent(self, alert: Alert) -> bool:
        return is_sent(alert, self.seen)

    def look(self) -> set[Alert]:
        """Record the alerts that fire now and the new notifications; return the alerts that fire."""
        firing = set()
        for row in self._prometheus.rows('ALERTS{alertstate="firing"}'):
            alert = alert_of(row["metric"])
            firing.add(alert)
            one = self.seen[alert]
            one.fired = self._now() if one.fired is None else one.fired
            one.firing_until = self._now()
        new = self._alertmanager.notified[self._read :]
        self._read += len(new)
        for notified in new:
            alert = alert_of(notified.labels)
            if not self.seen[alert].sent:
                say(f"sent to {notified.receiver} after {notified.at:.0f} s: {alert}")
            self.seen[alert].sent.append(notified)
        return firing


def is_sent(alert: Alert, seen: Mapping[Alert, Seen]) -> bool:
    """Whether the alert was sent, or the critical alert of the same name, which inhibits it."""
    same = (alert, Alert(alert.name, CRITICAL, alert.whom))
    return any(seen[one].sent for one in same if one in seen)


def judged(faults: Sequence[Fault], seen: Mapping[Alert, Seen], still: set[Alert]) -> list[str]:
    """The differences between the alerts that the faults must cause and those that were seen."""
    sent = {alert for fault in faults for alert in fault.sent}
    later = {alert for fault in faults for alert in fault.later}
    held_back = {alert for fault in faults for alert in fault.held_back}
    may = {alert for fault in faults for alert in fault.may}
    wrong = [
        f"{alert} did not fire" for alert in sorted(sent | later | held_back) if seen[alert].fired is None
    ]
    for alert, one in sorted(seen.items()):
        times = defaultdict(set)
        for notified in one.sent:
            times[tuple(sorted(notified.labels.items()))].add(notified.began)
        if alert not in sent | later | held_back | may:
            wrong.append(f"{alert} fired after {one.fired} s")
        if alert in held_back and one.sent:
            wrong.append(f"{alert} was sent after {one.sent[0].at:.0f} s")
        if alert in sent and not is_sent(alert, seen):
            wrong.append(f"{alert} was not sent")
        if any(len(began) > 1 for began in times.values()):
            wrong.append(f"{alert} was sent as several")
        if one.is_firing or alert in still:
            wrong.append(f"{alert} did not end")
        expected = "page" if alert.severity == CRITICAL else "default"
        if {notified.receiver for notified in one.sent} - {expected}:
            wrong.append(f"{alert} was sent to another than {expected}")
        source = seen.get(Alert(alert.name, CRITICAL, alert.whom), Seen())
        if alert in later and one.sent and (source.firing_until or 0) > one.sent[0].at:
            wrong.append(f"{alert} was sent while the critical one fired")
    return wrong


# runbooks


def followed(stage: Stage) -> dict[str, list[tuple[str, str, str]]]:
    """By runbook: each of its commands, the command that was run for it, and the output of that."""
    found = {}
    for alert, words in sorted(stage.pages.items()):
        daemon = stage.daemons[str(words["instance"])]
        found[alert] = [ran(command, daemon, words) for command in commands(RUNBOOKS[alert])]
    return found


def ran(command: str, daemon: Daemon, words: Mapping[str, object]) -> tuple[str, str, str]:
    done = command
    for word, value in {"127.0.0.1:9776": daemon.address, **words}.items():
        done = done.replace(word, str(value))
    if command.startswith(NO_SERVICE):
        return command, "(the log of the daemon)", "".join(daemon.lockd.log[-20:])
    done = re.sub(r"^(sudo )?lockd ", "/usr/bin/python3 -m lockd ", done)
    if " top " in done:
        done += f" --url http://{daemon.address}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    one = subprocess.run(
        ["bash", "-o", "pipefail", "-c", done],
        cwd=daemon.directory, env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return command, done, one.stdout + one.stderr


# the run


def measure(chosen: Sequence[Fault], factor: int) -> dict[str, Any]:
    """Run the whole bench, and return the figures for the report."""
    step, most = max(LEAST_STEP, STEP // factor), MOST_SECONDS / factor
    with contextlib.ExitStack() as ends:
        name = ends.enter_context(tempfile.TemporaryDirectory(prefix="lockd-bench-alerts-", dir="/var/tmp"))
        Path(name).chmod(0o755)  # for processes of the user nobody
        host, now = Host(Path(name), ends), Clock()
        stage = Stage(host, chosen)
        alertmanager = Alertmanager(host, factor, now)
        rules = write_rules(host.directory, factor)
        prometheus = Prometheus(host, stage.targets(), rules, step, alertmanager.address)
        expressions = Expressions(prometheus, factor, step, ["host-a", "host-b"], stage.impossible)
        watch = Watch(prometheus, alertmanager, expressions, now)
        say(f"healthy for {HEALTHY_SECONDS:g} s")
        time.sleep(HEALTHY_SECONDS)
        healthy = sorted(map(str, watch.look()))
        now.begin()
        with contextlib.ExitStack() as staged:
            for fault in chosen:
                watch.until(lambda fault=fault: may_begin(fault, watch, now), most)  # type: ignore[misc]
                say(f"{fault.name} begins")
                staged.enter_context(fault.stage(stage))
            watch.until(lambda: is_said(chosen, watch), most)
            watch.until(lambda: False, GROUP_WAIT / 2 + max(GROUP_WAIT, GROUP_INTERVAL_SECONDS / factor))
            say("following the runbooks")
            pages = followed(stage)
            say("the faults end")
        ended = now()
        time.sleep(step)
        watch.until(lambda: not watch.look() and not any(one.is_firing for one in watch.seen.values()), most)
        time.sleep(step)
        still = watch.look()
        return {
            "factor": factor,
            "seconds": {"faults": ended, "until all alerts had ended": now() - ended},
            "notifications": alertmanager.notifications,
            "healthy": healthy,
            "seen": dict(watch.seen),
            "wrong": judged(chosen, watch.seen, still),
            "expressions": expressions,
            "pages": pages,
        }


def write_rules(directory: Path, factor: int) -> list[Path]:
    written = []
    for path in (*RULES, OBJECTIVES):
        written.append(directory / path.name)
        written[-1].write_text(yaml.safe_dump(faster_rules(path, factor)))
    written.append(directory / "burn.yml")
    written[-1].write_text(yaml.safe_dump({"groups": [{"name": "burn", "rules": [BURN]}]}))
    return written


def may_begin(fault: Fault, watch: Watch, now: Clock) -> bool:
    return now() >= fault.after and (fault.awaits is None or watch.is_sent(fault.awaits))


def is_said(faults: Sequence[Fault], watch: Watch) -> bool:
    """Whether all alerts that must be sent were sent, and all alerts that are inhibited have fired."""
    fires = (alert for fault in faults for alert in fault.held_back + fault.later)
    return all(watch.is_sent(alert) for fault in faults for alert in fault.sent) and all(
        watch.seen[alert].fired is not None for alert in fires
    )


def failures(found: dict[str, Any], is_all: bool) -> list[str]:
    wrong = [f"while nothing was wrong: {alert}" for alert in found["healthy"]] + found["wrong"]
    if is_all:
        wrong += found["expressions"].wrong()
        wrong += [
            f"the runbook of {alert} was not followed" for alert in sorted({*RUNBOOKS} - {*found["pages"]})
        ]
    wrong += [
        f"the runbook of {alert}: {command} printed nothing"
        for alert, rows in found["pages"].items()
        for command, _, printed in rows
        if not printed.strip() and not INTO_FILE.search(command)
    ]
    return wrong


def report(found: dict[str, Any], wrong: Sequence[str]) -> str:
    """The report on the alerts, as Markdown."""

    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.0f} s"

    factor = found["factor"]
    text = "# Every alert, for what it is about\n\n"
    if factor > 1:
        text += f"The durations of rules with one of five minutes or more are divided by {factor}. "
    text += "; ".join(f"{name} {value:.0f} s" for name, value in found["seconds"].items())
    text += f"; {found['notifications']} notifications.\n\n"
    text += "".join(f"- **{one}**\n" for one in wrong) or "All is as it should be.\n"
    text += "\nSeconds are since the first fault began.\n\n"
    rows = []
    for alert, one in sorted(found["seen"].items()):
        to = ", ".join(sorted({notified.receiver for notified in one.sent})) or "nobody"
        first = one.sent[0].at if one.sent else None
        last = one.ended if one.sent else one.firing_until
        rows.append(
            (alert.name, alert.severity, alert.whom, seconds(one.fired), to, seconds(first), seconds(last))
        )
    return text + results.table("alert | severity | about | fired | sent to | sent | ended", rows)


def shown(pages: Mapping[str, Sequence[tuple[str, str, str]]]) -> str:
    """The output of the commands of the runbooks, as Markdown."""
    text = "# The commands of the runbooks, on what they are about\n"
    for alert, rows in pages.items():
        text += f"\n## {alert}\n"
        for command, done, printed in rows:
            text += f"\n`{command}`\n\n```console\n$ {done}\n{printed.rstrip()}\n```\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faster", type=int, default=10, help="default: %(default)s; 1: all is as committed")
    parser.add_argument("--faults", help="some of them, with commas between; default: all")
    args = parser.parse_args()
    known = {fault.name: fault for fault in faults()}
    names = args.faults.split(",") if args.faults else list(known)
    if unknown := {*names} - {*known}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    chosen = [known[name] for name in names]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    subprocess.run(["make", "-s", "-C", ROOT / "tests/workloads"], check=True)
    host = results.host()
    found = measure(chosen, args.faster)
    wrong = failures(found, len(chosen) == len(known))
    text = report(found, wrong)
    seen = {str(alert): {"fired": one.fired, "sent": len(one.sent)} for alert, one in found["seen"].items()}
    results.write("alerts", {"host": host, "failures": wrong, "seen": seen}, text)
    expressions: Expressions = found["expressions"]
    results.write("expressions", {"expressions": expressions.rows()}, expressions.report())
    results.write("runbooks", found["pages"], shown(found["pages"]))
    print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
