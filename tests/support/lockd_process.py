"""A real daemon on this host's kernel, and its /metrics as numbers."""

from __future__ import annotations

import contextlib
import http
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = ("/usr/bin/python3", "-m", "lockd")
"""The command that starts the lockd of the checkout, if that is the current directory."""
CANNOT = 3
"""The exit code of lockd where the host cannot do what lockd is asked for."""
LACKS = re.compile(
    r"this kernel has no |the kernel hides its functions|kernel\.kptr_restrict|BTF does not describe"
    r"|they cannot be told apart|no probe can be attached there|tracefs: not mounted"
    r"|does_nothing: the kernel refuses it|down_read_killable: cannot be attached"
)
"""What lockd says if a kernel lacks something (lockd/load/host.py, lockd/trace/probes/patterns.py).

The last two alternatives are about the empty program with which lockd tries whether fentry works.
"""
REFUSALS = re.compile(
    r"(?<!does_nothing): the kernel refuses |(?<!down_read_killable): cannot be attached"
    r"|: no \w+ can be set|takes no program"
)
"""What lockd says if the kernel refuses a program, a map or an attachment. That is a fault of lockd."""
START_SECONDS = 300.0
"""The time that a daemon may take to start: several start at the same time on an emulated machine."""
REPEATED_SECONDS = 0.25
"""The pause before a request is repeated: the exporter may give the same answer for 200 ms."""
SETTLED_SECONDS = 30.0
IS_IN_MACHINE = "LOCKD_TEST_PERIOD" in os.environ
"""Whether this is an emulated machine (tests/vm/inside.py)."""
PERIOD = os.environ.get("LOCKD_TEST_PERIOD", "50ms")
"""The period of the daemons. With the usual one, several daemons at a time would be too much work for an
emulated machine."""
PERIOD_SECONDS = int(PERIOD.removesuffix("ms")) / 1000

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """One scrape: samples by name, as Prometheus would store them."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, dict[Labels, float]] = {}
        self._by_comm: dict[tuple[str, str], dict[Labels, float]] = {}
        """The same samples by name and comm: there may be many of them, but few of one process."""
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = tuple(sorted(sample.labels.items()))
                self.samples.setdefault(sample.name, {})[key] = sample.value
                whose = sample.name, sample.labels.get("comm", "")
                self._by_comm.setdefault(whose, {})[key] = sample.value

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of all series of `name` that have these labels; 0 if there are none."""
        return sum(value for _, value in self._having(name, labels))

    def max(self, name: str, **labels: str) -> float:
        return max((value for _, value in self._having(name, labels)), default=0.0)

    def labels(self, name: str, **labels: str) -> list[dict[str, str]]:
        return [dict(key) for key, _ in self._having(name, labels)]

    def _having(self, name: str, labels: dict[str, str]) -> list[tuple[Labels, float]]:
        comm = labels.get("comm")
        samples = self.samples.get(name, {}) if comm is None else self._by_comm.get((name, comm), {})
        wanted = set(labels.items())
        return [(key, value) for key, value in samples.items() if wanted <= set(key)]

    @property
    def dropped(self) -> float:
        return self.sum("lockd_dropped_events_total")

    @property
    def not_told(self) -> float:
        """The most waits and wakes of user-space locks that are in no series of a process.

        A map was full for them, or the kernel called no program, as it does on a CPU on which the sampler was
        preempted while it read a map.
        """
        name = "lockd_dropped_events_total"
        of_them = [one for one in self.labels(name) if one["map"] == "futex" or one["reason"] == "recursion"]
        dropped = sum(self.sum(name, **one) for one in of_them)
        return dropped + self.sum("lockd_overflow_events_total", map="futex")

    @property
    def counts_calls(self) -> bool:
        """Whether every futex call is counted, as in mode calls."""
        return "lockd_futex_waits_total" in self.samples


def _total(beginning: str, text: str) -> int:
    """Return the sum of the values of all lines that begin with `beginning`.

    This is much faster than parsing all lines, which may be 100,000.
    """
    lines = re.findall(rf"^{re.escape(beginning)}.*", text, re.MULTILINE)
    return int(sum(float(line.split()[-1]) for line in lines))


def _threads_below(pid: int) -> dict[int, tuple[str, int, int]]:
    """Return what each thread of a process and its children does, and how long it ran and waited for a CPU.

    The times are in ns.
    """
    threads: dict[int, tuple[str, int, int]] = {}
    with contextlib.suppress(OSError):  # threads and processes may end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            comm, _, rest = (task / "stat").read_text().partition(")")
            ran, waited, _ = map(int, (task / "schedstat").read_text().split())
            where = (task / "wchan").read_text()
            threads[int(task.name)] = f"{comm[comm.index('(') + 1 :]} {rest.split()[0]} {where}", ran, waited
            for child in (task / "children").read_text().split():
                threads |= _threads_below(int(child))
    return threads


def is_lack(said: str) -> bool:
    """Whether a command that ended with CANNOT says that this kernel lacks something.

    A command ends so too if the kernel refuses one of lockd's own programs. Such a test must fail, and not be
    skipped.
    """
    errors = "\n".join(re.findall(r"^lockd: error: (.*)", said, re.MULTILINE)) or said
    return LACKS.search(errors) is not None and REFUSALS.search(errors) is None


class NotStarted(AssertionError):
    """lockd did not start.

    `code` is its exit code, 3 if this host cannot do it; None if it did not serve and had not ended in time.
    """

    def __init__(self, code: int | None, log: str) -> None:
        super().__init__(f"lockd did not start:\n{log}")
        self.code = code
        self.log = log


def lockd_or_reason(directory: Path, config: dict[str, Any]) -> Lockd | str:
    """Return a daemon that is so configured, or what this kernel lacks for one."""
    try:
        return Lockd(directory, config)
    except NotStarted as error:
        if error.code == CANNOT and is_lack(error.log):
            return error.log.strip()
        raise


@contextlib.contextmanager
def unless_late() -> Iterator[None]:
    """Suppress the error for a request that the sampler had no time to answer.

    The exporter answers with code 503 if the sampler takes more than five seconds.
    """
    try:
        yield
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.SERVICE_UNAVAILABLE:
            raise


class Lockd:
    """`lockd run` with `config` over the defaults, at `listen`, or on a port that the kernel chooses.

    It has no budgets of CPU time, for itself and for answers: what a test asks of it may well cost too much.
    `program` is the command that starts lockd; signals go to its process. `how` has arguments of Popen. When
    used as a context, the daemon has ended at the end, also if the test fails.
    """

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any] | None = None,
        program: Sequence[str | Path] = CHECKOUT,
        listen: str = "127.0.0.1:0",
        **how: Any,
    ) -> None:
        path = directory / "lockd.yaml"
        unlimited = {"cpu": None, "requests": None}
        path.write_text(yaml.safe_dump({"period": PERIOD, "budget": unlimited, **(config or {})}))
        self.process = subprocess.Popen(
            [*program, "run", f"--config.file={path}", f"--web.listen-address={listen}"],
            **{"cwd": ROOT, "stderr": subprocess.PIPE, "text": True, **how},
        )
        self.log: list[str] = []
        self._serving = threading.Event()
        self.address = ""
        threading.Thread(target=self._read_log, daemon=True).start()
        if not self._serving.wait(START_SECONDS) or not self.address:
            code = self.process.wait(10) if self._serving.is_set() else None
            self.process.kill()
            raise NotStarted(code, "".join(self.log))

    def __enter__(self) -> Lockd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(30)

    def _read_log(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"serving on (\S+)", line):
                self.address = found[1]
                self._serving.set()
        self._serving.set()

    def get(self, path: str) -> bytes:
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=30) as answer:
                body: bytes = answer.read()
        except TimeoutError as error:
            raise AssertionError(f"{self.address}{path}: no answer: {self._states()}") from error
        except ConnectionError as error:
            raise AssertionError(self._ended()) from error
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
            raise AssertionError(self._ended()) from error
        return body

    def _states(self) -> str:
        """Return what each thread of lockd does in a second: it runs, waits for a CPU, or is asleep."""
        before, lines = _threads_below(self.process.pid), []
        time.sleep(1)
        for tid, (what, ran, waited) in _threads_below(self.process.pid).items():
            _, ran_before, waited_before = before.get(tid, ("", ran, waited))
            seconds = [(ran - ran_before) / 1e9, (waited - waited_before) / 1e9, ran / 1e9, waited / 1e9]
            lines.append(
                "{} {}: ran {:.3f} s, waited for a CPU {:.3f} s; in all {:.1f}, {:.1f} s".format(
                    tid, what, *seconds
                )
            )
        return "\n".join([*lines, *self.log[-20:]])

    def _ended(self) -> str:
        """Return the message for a daemon that does not answer, with its exit code and log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        return f"{self.address} does not answer, exit code {self.process.poll()}:\n{''.join(self.log)}"

    def metrics(self, settled: bool = True) -> Metrics:
        """Return the metrics now; if `settled`, with everything that happened before the call."""
        if settled:
            self.settle()
        return Metrics(self._text())

    def settle(self) -> None:
        """Wait until everything that happened before the call is counted."""
        deadline = time.monotonic() + SETTLED_SECONDS
        while True:
            try:
                self.get("/-/settled")
                return
            except urllib.error.HTTPError as error:
                assert time.monotonic() < deadline, f"after {SETTLED_SECONDS:g} s: {error.read().decode()}"

    def _text(self) -> str:
        return self.get("/metrics").decode()

    def dropped(self, of: str) -> int:
        """Return the number of events of the map `of` that were not counted so far."""
        return _total(f'lockd_dropped_events_total{{map="{of}",', self._text())

    def api(self, what: str, **query: str) -> list[dict[str, Any]]:
        text = "&".join(f"{key}={value}" for key, value in query.items())
        rows: list[dict[str, Any]] = json.loads(self.get(f"/api/v1/{what}?{text}"))[what]
        return rows

    def _lost(self) -> dict[str, dict[Labels, float]]:
        """Return the metrics of events without a count or a series of their own, and of the maps' entries."""
        samples = self.metrics(settled=False).samples
        names = ("lockd_dropped_events_total", "lockd_overflow_events_total", "lockd_map_entries")
        return {name: {key: value for key, value in samples[name].items() if value} for name in names}

    def waited_for(self, **query: str) -> list[dict[str, Any]]:
        """Return the locks that were waited for, once there are some and all have their names."""
        deadline = time.monotonic() + SETTLED_SECONDS
        while True:
            rows = [row for row in self.api("locks", **query) if row["blocked_count"]]
            if rows and all(row["lock"] for row in rows):
                return rows
            assert time.monotonic() < deadline, (rows, self._lost())
            time.sleep(REPEATED_SECONDS)

    def until(self, holds: Callable[[Metrics], bool], seconds: float) -> Metrics:
        """Scrape until `holds` is true of the scrape, and return that scrape. Fails after `seconds`.

        A scrape for which the sampler has no time counts as one of which `holds` is not true.
        """
        deadline = time.monotonic() + seconds
        while True:
            with unless_late():
                metrics = self.metrics(settled=False)
                if holds(metrics):
                    return metrics
            assert time.monotonic() < deadline, f"not so within {seconds:g} s"
            time.sleep(0.1)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
