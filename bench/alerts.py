"""Every alert fires for what it is about, is sent once, and ends.

`sudo make alerts` writes bench/build/alerts.md, expressions.md and runbooks.md, and exits with 1 if something
is not as it should be.

Daemons that each count only the processes staged for them are as many hosts. A real Prometheus scrapes them
with the rules that come with lockd, and a real Alertmanager with alertmanager.yml tells whom it would notify.
First nothing is wrong and nothing may fire; then all faults are there at the same time; then none is left,
and all alerts must end.

The durations of rules with one of five minutes or more, and Alertmanager's group_interval, are divided by
`--faster`. All else is as committed, but that scrapes come every five seconds, for the divided ranges.

While the faults last, every expression of the dashboards, rules and documents is asked for
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench import results
from bench.expressions import Expressions
from bench.host import KILLED_WITH_US, Host, cgroup2, free_port, limited, say
from bench.prometheus import RULES, Alertmanager, Notified, Prometheus, faster_rules
from tests.support.lockd_process import CHECKOUT, Lockd
from tests.support.watch_files import OBJECTIVES, RUNBOOKS, commands
from tests.support.workload import BUILD

ROOT = Path(__file__).resolve().parents[1]
REFUSING = (sys.executable, ROOT / "tests/kernel/refusing.py", "EPERM", "298", "--")
"""What runs the rest without perf_event_open(2), which takes kprobes away."""
STEP = 5.0
"""Seconds between scrapes, and between evaluations of the rules."""
HEALTHY_SECONDS = 30.0
MOST_SECONDS = 360.0
"""From the first fault until all is sent that has to be."""
MARGIN_SECONDS = 45.0
"""After that, for what must not be sent: Alertmanager waits for 30 s before it tells of a new group."""
ENDED_SECONDS = 420.0
"""From the end of the faults until all alerts have ended."""
LOOK_SECONDS = 20.0
MAXIMUM_SECONDS = 75.0
"""For which a maximum over a minute has a wait that is over, and Prometheus the maximum."""
WARNING, CRITICAL = "warning", "critical"
SLOW_BYTES = 256 << 10
"""In each second, that a slow disk takes."""
BURN = {
    "record": "unit:lockd_blocked_objective:ratio",
    "expr": "vector(0.12)",
    "labels": {"unit": "b-slow.service"},
}
"""The objective of a unit one thread of which is blocked all the time: eight times too much."""
NO_SERVICE = ("systemctl", "journalctl")
"""Commands about lockd.service, which is none here: the log of the daemon is told instead."""


@dataclass(frozen=True, order=True)
class Alert:
    """`whom` it is about: a comm, else a unit, else a lock of the kernel, else a host."""

    name: str
    severity: str
    whom: str

    def __str__(self) -> str:
        return f"{self.name} ({self.severity}) for {self.whom}"


def alert_of(labels: Mapping[str, str]) -> Alert:
    whom = next(filter(None, map(labels.get, ("comm", "unit", "lock", "instance", "job"))), "")
    return Alert(labels["alertname"], labels["severity"], whom)


def warnings(name: str, *whom: str) -> tuple[Alert, ...]:
    return tuple(Alert(name, WARNING, one) for one in whom)


def criticals(name: str, *whom: str) -> tuple[Alert, ...]:
    return tuple(Alert(name, CRITICAL, one) for one in whom)


@dataclass(frozen=True)
class Fault:
    """What is wrong while `stage` runs.

    `sent` are the alerts that must be sent. `held_back` must fire and be sent to nobody: others say the same.
    `later` are held back and sent when what held them back has ended first. `may` may be sent or not.
    """

    name: str
    stage: Callable[[Stage], contextlib.AbstractContextManager[object]]
    sent: tuple[Alert, ...]
    held_back: tuple[Alert, ...] = ()
    later: tuple[Alert, ...] = ()
    may: tuple[Alert, ...] = ()
    after: float = 0.0
    """Seconds after the first."""


class Daemon:
    """A lockd that can be started anew at its address."""

    def __init__(self, host: Host, name: str, config: Mapping[str, Any]) -> None:
        self.directory, self.name, self._config = host.make(name), name, config
        self._host, self.address = host, f"127.0.0.1:{free_port()}"
        self.start()
        host.ends.callback(self.kill)

    def start(self, *program: str | Path, **config: Any) -> None:
        """With `config` over its own."""
        command = (*KILLED_WITH_US, *program, *CHECKOUT)
        self.lockd = Lockd(self.directory, {**self._config, **config}, command, listen=self.address)

    def start_anew(self, *program: str | Path, **config: Any) -> None:
        self.lockd.stop()
        self.start(*program, **config)

    def kill(self) -> None:
        self.lockd.process.kill()
        self.lockd.process.wait()

    @contextmanager
    def reloaded(self, change: Callable[[str], str]) -> Iterator[None]:
        """With a configuration that is changed so, and then as before."""
        file = self.directory / "lockd.yaml"
        before = file.read_text()
        for text in (change(before), before):
            file.write_text(text)
            self.lockd.process.send_signal(signal.SIGHUP)
            if text is not before:
                yield


class Stage:
    """The daemons, the processes, and on what the commands of each runbook are to be run."""

    def __init__(self, host: Host, faults: Sequence[Fault]) -> None:
        self.host = host
        self.daemons: dict[str, Daemon] = {}
        self.impossible: dict[str, str] = {}
        """Why expressions must return nothing on this host, by what their text has."""
        self.pages: dict[str, dict[str, object]] = {}
        """By alert: the host, and the words in the commands that stand for something there."""
        usual = yaml.safe_load((ROOT / "config/lockd.yaml").read_text())

        def add(name: str, *comms: str, **more: Any) -> None:
            say(f"starting lockd of {name}")
            self.daemons[name] = Daemon(host, name, {**usual, "filter": {"comms": [*comms]}, **more})

        add("host-a", "a-*", "everywhere")
        add("host-b", "b-*", "shop", "everywhere", programs=self._every_program())
        add("host-c", "c-*", "everywhere")
        for fault in faults:
            if fault.name in OF_LOCKD:
                add(fault.name, "nobody")

    def _every_program(self) -> dict[str, Any]:
        """All that can be counted on this host."""
        programs = {"futex": {"mode": "calls"}, "kernel_locks": {"mode": "all"}}
        tried = Lockd(self.host.make("tried"), {"programs": programs})
        tried.stop()
        missing = re.findall("hook missing: (.*)", "".join(tried.log))
        if not missing:
            return programs
        self.impossible[r"lockd_kernel_lock_(acquisitions|hold)_"] = f"mode all cannot run here: {missing[0]}"
        return {"futex": {"mode": "calls"}}

    def targets(self) -> list[dict[str, Any]]:
        return [
            {"targets": [daemon.address], "labels": {"instance": name, "cluster": "staged"}}
            for name, daemon in self.daemons.items()
        ]

    @contextmanager
    def running(self, comm: str, workload: str, *arguments: object) -> Iterator[subprocess.Popen[Any]]:
        """A program of tests/workloads, in a unit of the same name as its process."""
        process = self.host.workload(comm, BUILD / workload, *arguments)
        yield process
        process.kill()
        process.wait()

    def page(self, alert: str, instance: str, **words: object) -> None:
        self.pages[alert] = {"instance": instance, **words}


# what services do wrong


@contextmanager
def deadlock(stage: Stage) -> Iterator[None]:
    with stage.running("a-deadlock", "deadlock", 0, 2) as process:
        stage.page("LockdDeadlock", "host-a", PID=process.pid)
        yield


@contextmanager
def stuck(stage: Stage) -> Iterator[None]:
    with stage.running("a-stuck", "stuck_mutex") as process:
        stage.page("LockdThreadStuck", "host-a", PID=process.pid)
        yield


@contextmanager
def short_waits(stage: Stage) -> Iterator[None]:
    """What most processes have done for long when one of their threads gets stuck."""
    with stage.running("a-late", "mutex_handover", 1_000_000, 100_000):
        yield


@contextmanager
def stuck_later(stage: Stage) -> Iterator[None]:
    with stage.running("a-late", "stuck_mutex"):
        yield


@contextmanager
def stuck_in_kernel(stage: Stage) -> Iterator[None]:
    with stage.running("a-inside", "kernel_locks", 1, 600_000_000, stage.host.directory):
        yield


@contextmanager
def convoy(stage: Stage) -> Iterator[None]:
    with stage.running("a-convoy", "mutex_handover", 10_000, 2_000_000):
        stage.page("LockdLockWaitLong", "host-a")
        yield


@contextmanager
def long_hold(stage: Stage) -> Iterator[None]:
    with stage.running("a-hold", "mutex_handover", 10_000, 12_000_000):
        yield


@contextmanager
def slow_disk(stage: Stage) -> Iterator[None]:
    """A lock is held over writes, each of which takes two seconds."""
    directory = stage.host.directory
    controller, unit = ("io", "wbps=") if "io" in of_cgroup2() else ("blkio", "")
    how = ("io.max", "blkio.throttle.write_bps_device", f"{disk_of(directory)} {unit}{SLOW_BYTES}")
    workload = ("a-disk", "slow_disk", 10_000, 2 * SLOW_BYTES >> 10, directory)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(stage.running(*workload))
        stack.enter_context(limited("a-disk.service", controller, [process.pid], *how))
        yield


def disk_of(path: Path) -> str:
    """The numbers of its disk, not of a partition."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return ((device.parent if (device / "partition").exists() else device) / "dev").read_text().strip()


@contextmanager
def kernel_locks(stage: Stage) -> Iterator[None]:
    with stage.running("a-kernel", "kernel_locks", 1000, 2_000_000, stage.host.directory):
        stage.page("LockdKernelLockWaitLong", "host-a")
        yield


@contextmanager
def mmap_lock(stage: Stage) -> Iterator[None]:
    """Its holder gets no processor."""
    with stage.running("a-mmap", "idle_holder", 3600, 64, 4):
        yield


@contextmanager
def cpu_limit(stage: Stage) -> Iterator[None]:
    """A fifth of a processor for two threads that could use one each."""
    with stage.running("a-cpu", "spinner", 3600) as process:
        name, value = "a-cpu.service", "20000 100000" if "cpu" in of_cgroup2() else 20000
        with limited(name, "cpu", [process.pid], "cpu.max", "cpu.cfs_quota_us", value) as cgroup:
            stage.page("LockdRunQueueLong", "host-a", **{"/sys/fs/cgroup/CGROUP": cgroup, "UNIT": name})
            yield


def of_cgroup2() -> list[str]:
    root = cgroup2()
    return (root / "cgroup.controllers").read_text().split() if root else []


@contextmanager
def everywhere(stage: Stage) -> Iterator[None]:
    """Two threads at a time wait for the same lock on three hosts, never long."""
    one = ("everywhere", "mutex_handover", 1_000_000, 20_000)
    with stage.running(*one), stage.running(*one):
        stage.page("LockdLockOnManyHosts", "host-c")
        yield


@contextmanager
def longer_everywhere(stage: Stage) -> Iterator[None]:
    """Beside the short waits, and over so long before these that no maximum has them any more."""
    with stage.running("everywhere", "mutex_handover", 10_000, 2_000_000):
        yield
    time.sleep(MAXIMUM_SECONDS)


@contextmanager
def burn(stage: Stage) -> Iterator[None]:
    """One thread of shop is blocked all the time, and 50 ms in each second are allowed."""
    with stage.running("shop", "mutex_handover", 1_000_000, 20_000):
        stage.page("LockdObjectiveBurn", "host-b")
        yield


@contextmanager
def slow_burn(stage: Stage) -> Iterator[None]:
    with stage.running("b-slow", "mutex_handover", 1_000_000, 20_000):
        yield


# what is wrong with lockd itself


@contextmanager
def down(stage: Stage) -> Iterator[None]:
    daemon = stage.daemons["down"]
    daemon.kill()
    yield
    daemon.start()


@contextmanager
def hung(stage: Stage) -> Iterator[None]:
    """Its exporter answers that the sampler does not."""
    process = stage.daemons["hung"].lockd.process
    process.send_signal(signal.SIGSTOP)
    stage.page("LockdDown", "hung")
    yield
    process.send_signal(signal.SIGCONT)


@contextmanager
def starved(stage: Stage) -> Iterator[None]:
    """A hundredth of a processor for the sampler."""
    pid = stage.daemons["starved"].lockd.process.pid
    value = "1000 100000" if "cpu" in of_cgroup2() else 1000
    with limited("starved.service", "cpu", [pid], "cpu.max", "cpu.cfs_quota_us", value):
        stage.page("LockdTicksLate", "starved", PID=pid)
        yield


@contextmanager
def small_maps(stage: Stage) -> Iterator[None]:
    daemon = stage.daemons["small-maps"]
    daemon.start_anew(maps={"entries": 64, "threads": 64})
    stage.page("LockdDroppedEvents", daemon.name)
    yield
    daemon.start_anew()


@contextmanager
def missing_hook(stage: Stage) -> Iterator[None]:
    daemon = stage.daemons["missing-hook"]
    daemon.start_anew(*REFUSING, programs={"kernel_locks": {"mechanism": "kprobe"}})
    stage.page("LockdHookMissing", daemon.name)
    yield
    daemon.start_anew()


@contextmanager
def small_budget(stage: Stage) -> Iterator[None]:
    daemon = stage.daemons["small-budget"]
    stage.page("LockdRestraint", daemon.name)
    with daemon.reloaded(lambda text: text.replace("cpu: auto", "cpu: 0.01%")):
        yield


@contextmanager
def refused_configuration(stage: Stage) -> Iterator[None]:
    daemon = stage.daemons["refused-configuration"]
    file = daemon.directory / "lockd.yaml"
    stage.page("LockdConfigurationRefused", daemon.name, **{"/etc/lockd/lockd.yaml": file})
    with daemon.reloaded(lambda text: text.replace("period:", "perid:")):
        yield


def faults() -> tuple[Fault, ...]:
    wait, kernel, thread = "LockdLockWaitLong", "LockdKernelLockWaitLong", "LockdThreadStuck"

    def waits(name: str, whom: str) -> tuple[Alert, ...]:
        return warnings(name, whom) + criticals(name, whom)

    return (
        Fault(
            "deadlock",
            deadlock,
            criticals("LockdDeadlock", "a-deadlock"),
            waits(wait, "a-deadlock") + criticals(thread, "a-deadlock"),
        ),
        Fault("stuck", stuck, criticals(thread, "a-stuck"), waits(wait, "a-stuck")),
        Fault("short-waits", short_waits, ()),
        Fault("stuck-later", stuck_later, criticals(thread, "a-late"), waits(wait, "a-late"), after=60),
        Fault("stuck-in-kernel", stuck_in_kernel, criticals(thread, "a-inside"), waits(kernel, "a-inside")),
        Fault("convoy", convoy, warnings(wait, "a-convoy")),
        Fault("long-hold", long_hold, criticals(wait, "a-hold"), warnings(wait, "a-hold")),
        Fault("slow-disk", slow_disk, warnings(wait, "a-disk")),
        Fault("kernel-locks", kernel_locks, warnings(kernel, "a-kernel")),
        Fault(
            "mmap_lock",
            mmap_lock,
            warnings(kernel, "a-mmap"),
            # Its holder waits for the processor, and for how long depends on who else uses that.
            may=criticals(kernel, "a-mmap") + warnings("LockdRunQueueLong", "a-mmap.service"),
        ),
        Fault("cpu-limit", cpu_limit, warnings("LockdRunQueueLong", "a-cpu.service")),
        Fault("everywhere", everywhere, warnings("LockdLockOnManyHosts", "everywhere")),
        Fault("longer-everywhere", longer_everywhere, (), warnings(wait, "everywhere"), after=150),
        Fault(
            "burn",
            burn,
            criticals("LockdObjectiveBurn", "shop.service"),
            later=warnings("LockdObjectiveBurn", "shop.service"),
        ),
        Fault("slow-burn", slow_burn, warnings("LockdObjectiveBurn", "b-slow.service")),
        Fault("down", down, warnings("LockdDown", "down")),
        Fault("hung", hung, warnings("LockdDown", "hung")),
        Fault("starved", starved, warnings("LockdTicksLate", "starved")),
        Fault("small-maps", small_maps, warnings("LockdDroppedEvents", "small-maps")),
        Fault("missing-hook", missing_hook, warnings("LockdHookMissing", "missing-hook")),
        Fault("small-budget", small_budget, warnings("LockdRestraint", "small-budget")),
        Fault(
            "refused-configuration",
            refused_configuration,
            warnings("LockdConfigurationRefused", "refused-configuration"),
        ),
    )


OF_LOCKD = ("down", "hung", "starved", "small-maps", "missing-hook", "small-budget", "refused-configuration")
"""Faults of lockd itself, each on a host of its name."""


# what is seen


@dataclass
class Seen:
    """What became of an alert: seconds since the first fault."""

    fired: float | None = None
    firing_until: float | None = None
    """When Prometheus last said that it fires."""
    sent: list[Notified] = field(default_factory=list)

    @property
    def is_firing(self) -> bool:
        """By what was sent: of any of the label sets."""
        last = {tuple(sorted(one.labels.items())): one.is_firing for one in self.sent}
        return any(last.values())

    @property
    def ended(self) -> float | None:
        return None if self.is_firing or not self.sent else self.sent[-1].at


class Watch:
    """Asks Prometheus which alerts fire, and keeps what Alertmanager sent."""

    def __init__(self, prometheus: Prometheus, alertmanager: Alertmanager, now: Callable[[], float]) -> None:
        self._prometheus, self._alertmanager, self._now = prometheus, alertmanager, now
        self.seen: dict[Alert, Seen] = defaultdict(Seen)
        self._read = 0

    def look(self) -> set[Alert]:
        """Those that fire now."""
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


def judged(faults: Sequence[Fault], seen: Mapping[Alert, Seen], still: set[Alert]) -> list[str]:
    """What is not as it should be."""
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
        if alert in sent and not one.sent:
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
    """By page: each command, what was run for it, and what that printed, with an exit code but 0."""
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
    code = f"(exit code {one.returncode})\n{one.stderr[-1000:]}" if one.returncode else ""
    return command, done, one.stdout + code


# the run


def measure(chosen: Sequence[Fault], factor: int) -> dict[str, Any]:
    """Run it all; what there is to report."""
    with contextlib.ExitStack() as ends:
        name = ends.enter_context(tempfile.TemporaryDirectory(prefix="lockd-bench-alerts-", dir="/var/tmp"))
        Path(name).chmod(0o755)  # for nobody
        host = Host(Path(name), ends)
        stage = Stage(host, chosen)
        rules = []
        for path in (*RULES, OBJECTIVES):
            rules.append(host.directory / path.name)
            rules[-1].write_text(yaml.safe_dump(faster_rules(path, factor)))
        rules.append(host.directory / "burn.yml")
        rules[-1].write_text(yaml.safe_dump({"groups": [{"name": "burn", "rules": [BURN]}]}))
        began = [time.monotonic()]

        def now() -> float:
            return time.monotonic() - began[0]

        alertmanager = Alertmanager(host, factor, now)
        prometheus = Prometheus(host, stage.targets(), rules, STEP, alertmanager.address)
        watch = Watch(prometheus, alertmanager, now)
        expressions = Expressions(prometheus, factor, STEP, stage.impossible)

        say(f"healthy for {HEALTHY_SECONDS:g} s")
        time.sleep(HEALTHY_SECONDS)
        healthy = sorted(map(str, watch.look()))
        began[0] = time.monotonic()
        with contextlib.ExitStack() as staged:
            for fault in sorted(chosen, key=lambda fault: fault.after):
                wait(watch, expressions, now, lambda after=fault.after: now() >= after)
                say(f"{fault.name} begins")
                staged.enter_context(fault.stage(stage))
            wanted = {alert for fault in chosen for alert in fault.sent}
            silent = {alert for fault in chosen for alert in fault.held_back + fault.later}

            def is_said() -> bool:
                return all(watch.seen[alert].sent for alert in wanted) and all(
                    watch.seen[alert].fired is not None for alert in silent
                )

            wait(watch, expressions, now, lambda: is_said() or now() > MOST_SECONDS)
            until = now() + MARGIN_SECONDS
            wait(watch, expressions, now, lambda: now() > until)
            say("following the runbooks")
            pages = followed(stage)
            say("the faults end")
        ended = now()
        time.sleep(STEP)

        def is_over() -> bool:
            return not watch.look() and not any(one.is_firing for one in watch.seen.values())

        wait(watch, None, now, lambda: is_over() or now() > ended + ENDED_SECONDS)
        time.sleep(STEP)
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
            "errors": host.errors,
            "log": {name: list(daemon.lockd.log) for name, daemon in stage.daemons.items()},
        }


def wait(
    watch: Watch, expressions: Expressions | None, now: Callable[[], float], is_over: Callable[[], bool]
) -> None:
    """Look again and again until then."""
    looked = now()
    while not is_over():
        watch.look()
        if expressions and now() - looked > LOOK_SECONDS:
            looked = now()
            expressions.look()
        time.sleep(1)


def failures(found: dict[str, Any], is_all: bool) -> list[str]:
    wrong = [f"while nothing was wrong: {alert}" for alert in found["healthy"]] + found["wrong"]
    if is_all:
        wrong += found["expressions"].wrong()
        wrong += [
            f"the runbook of {alert} was not followed" for alert in sorted({*RUNBOOKS} - {*found["pages"]})
        ]
    wrong += [
        f"{alert}: {command}: {printed.strip() or 'printed nothing'}"
        for alert, rows in found["pages"].items()
        for command, _, printed in rows
        if "(exit code" in printed or not (printed.strip() or "-so " in command or ">" in command)
    ]
    return wrong


def report(found: dict[str, Any], wrong: Sequence[str]) -> str:
    """As Markdown."""

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
    text += "| alert | severity | about | fired | sent to | sent | ended |\n|---|---|---|---|---|---|---|\n"
    for alert, one in sorted(found["seen"].items()):
        to = ", ".join(sorted({notified.receiver for notified in one.sent})) or "nobody"
        first = one.sent[0].at if one.sent else None
        last = one.ended if one.sent else one.firing_until
        text += f"| {alert.name} | {alert.severity} | {alert.whom} | {seconds(one.fired)} | {to} "
        text += f"| {seconds(first)} | {seconds(last)} |\n"
    return text


def shown(pages: Mapping[str, Sequence[tuple[str, str, str]]]) -> str:
    """What the commands of the runbooks printed, as Markdown."""
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
    results.write(
        "expressions",
        {one.where: one.rows for one in (*expressions.all, *expressions.variables)},
        "# How many rows each expression returned\n\n" + expressions.table(),
    )
    results.write("runbooks", found["pages"], shown(found["pages"]))
    print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
