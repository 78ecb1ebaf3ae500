"""Tests of a changed configuration: the keys that a running daemon takes, and what becomes of the others."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from lockd.config import schema
from lockd.config.reader import Key, all_keys
from lockd.config.schema import Config
from lockd.messages import ALIVE, NOT_RELOADED, RELOADED
from lockd.service import reload
from lockd.service.exporter import Exporter
from lockd.service.reload import Reloads

TAKEN = {
    "period": "20ms",
    "filter.units": "[shop.service]",
    "filter.comms": "[postgres]",
    "filter.exclude_comms": "[cc1]",
    "filter.pids": "[1]",
    "windows": "[10s]",
    "series.idle": "5m",
    "budget.cpu": "7%",
    "budget.requests": "50%",
    "log.level": "debug",
}
"""The keys that can change without attaching programs anew, each with a value other than the default."""
WAITING = {
    "programs.futex.enabled": "false",
    "programs.futex.mechanism": "kprobe",
    "programs.futex.mode": "calls",
    "programs.offcpu.enabled": "false",
    "programs.offcpu.mechanism": "tracepoint",
    "programs.kernel_locks.enabled": "false",
    "programs.kernel_locks.mechanism": "kprobe",
    "programs.kernel_locks.mode": "all",
    "filter.min_block": "1us",
    "filter.max_block": "1h",
    "histogram.buckets_us": "[1, 1024]",
    "series.max": "5000",
    "series.top_locks": "10",
    "maps.entries": "1024",
    "maps.threads": "1024",
    "maps.stacks": "64",
    "names.parked": "[gate]",
    "profile.samples_per_second": "5",
    "profile.waits_per_second": "5",
    "web.listen": '["127.0.0.1:1"]',
    "web.config_file": "/etc/lockd/web.yml",
}
"""The keys that take effect only at a restart, each with a value other than the default."""


class Answering:
    """A stand-in for the daemon's end of an exporter. It keeps what the exporter is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float | None]] = []
        self.has_room = True

    def reload(self, log_level: str, requests_share: float | None) -> bool:
        if self.has_room:
            self.told.append((log_level, requests_share))
        return self.has_room


class Daemon:
    """What reloads need of a daemon, with a configuration in a file."""

    def __init__(self, path: Path, keys: dict[str, str] | None = None) -> None:
        self.path = path
        path.write_text(yaml_of(keys or {}))
        self.exporter = Answering()
        self.taken: list[Config] = []
        self.steps: list[str] = []
        self.reloads = Reloads(
            schema.load(path),
            lambda: schema.load(path),
            self.taken.append,
            lambda: self.steps.append("begins"),
            lambda: self.steps.append("ends"),
        )

    def reload(self, text: str) -> None:
        """Reload the configuration `text`, up to the answer of the exporter."""
        self.path.write_text(text)
        self.reloads.request()
        self.look()

    def look(self, exporter: Answering | None = None) -> None:
        self.reloads.advance(cast(Exporter, exporter or self.exporter))


@pytest.fixture
def daemon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Daemon:
    caplog.set_level("INFO")
    return Daemon(tmp_path / "lockd.yaml")


def yaml_of(keys: dict[str, str]) -> str:
    """Return the text of a configuration file with these keys, which have dotted names."""
    tree: dict[str, Any] = {}
    for name, value in keys.items():
        *sections, last = name.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = yaml.safe_load(value)
    return yaml.safe_dump(tree)


def value_of(of: Config, name: str) -> object:
    value: object = of
    for part in name.split("."):
        value = getattr(value, part, None) if hasattr(value, part) else getattr(value, f"{part}_ns")
    return value


def test_each_key_is_decided_on() -> None:
    keys = {name: about for name, about in all_keys(Config) if isinstance(about, Key)}
    assert {name for name, about in keys.items() if about.reloads} == TAKEN.keys()
    assert {name for name, about in keys.items() if not about.reloads} == WAITING.keys()


@pytest.mark.parametrize("name", TAKEN)
def test_it_is_taken(daemon: Daemon, name: str, caplog: pytest.LogCaptureFixture) -> None:
    before = daemon.reloads.running
    daemon.reload(yaml_of({name: TAKEN[name]}))
    assert daemon.taken == [daemon.reloads.running] == [schema.load(daemon.path)]
    assert value_of(daemon.reloads.running, name) != value_of(before, name)
    assert daemon.reloads.waiting == []
    assert caplog.messages == [f"the configuration was read again; changed: {name}"]


@pytest.mark.parametrize("name", WAITING)
def test_it_waits_for_a_restart(daemon: Daemon, name: str, caplog: pytest.LogCaptureFixture) -> None:
    if name == "programs.futex.mechanism":
        daemon = Daemon(daemon.path, before := {"programs.futex.mode": "calls"})
    else:
        before = {}
    running = daemon.reloads.running
    daemon.reload(yaml_of({**before, name: WAITING[name]}))
    assert daemon.reloads.running == running
    assert daemon.reloads.waiting == [name]
    assert caplog.messages[-1] == f"{name}: takes effect at a restart"


def test_what_can_be_taken_is_beside_what_cannot(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    before = daemon.reloads.running
    both = {"programs.futex.enabled": "false", "filter.comms": "[shop]", "filter.min_block": "1us"}
    daemon.reload(yaml_of(both))
    expected = dataclasses.replace(before, filter=dataclasses.replace(before.filter, comms=("shop",)))
    assert daemon.taken == [expected]
    assert caplog.messages == [
        "the configuration was read again; changed: filter.comms",
        "programs.futex.enabled, filter.min_block: take effect at a restart",
    ]
    daemon.reloads.handle_message(RELOADED)
    assert daemon.reloads.was_successful
    daemon.reload("")
    assert daemon.reloads.running == before
    assert daemon.reloads.waiting == [], "what was waiting is as it was"


def test_there_are_no_more_windows_than_lines_were_kept_for(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.reload("windows: [10s, 20s, 30s]\nlog: {level: error}")
    assert [window.name for window in daemon.reloads.running.windows] == ["1m", "5m"]
    assert daemon.reloads.waiting == ["windows"]
    assert daemon.reloads.running.log.level == "error"
    daemon.reloads.handle_message(RELOADED)
    daemon.reload("windows: [10s]")
    daemon.reloads.handle_message(RELOADED)
    daemon.reload("windows: [10s, 20s]")
    assert [window.name for window in daemon.reloads.running.windows] == ["10s", "20s"]


def test_of_a_wrong_file_nothing_is_taken(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    before = daemon.reloads.running
    daemon.reload("log: {level: debug}\nperid: 10ms\nmaps: {entries: 3}")
    assert (daemon.taken, daemon.exporter.told) == ([], [])
    assert daemon.reloads.running == before
    (said,) = caplog.messages
    assert said.startswith("the configuration before this one stays in force: ")
    assert (
        f'{daemon.path}:2: perid: unknown key; did you mean "period"?; {daemon.path}:3: maps.entries: 3'
        in said
    )
    assert "\n" not in said
    assert daemon.steps == ["begins", "ends"]
    assert not daemon.reloads.was_successful
    daemon.reload("log: {level: debug}")
    daemon.reloads.handle_message(RELOADED)
    assert daemon.reloads.was_successful


def test_a_file_that_is_gone_is_wrong(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    daemon.path.unlink()
    daemon.reloads.request()
    daemon.look()
    assert not daemon.reloads.was_successful
    assert "cannot read this configuration: No such file or directory" in caplog.text


@pytest.mark.parametrize("message", [RELOADED, NOT_RELOADED])
def test_it_ends_with_the_exporters_answer(daemon: Daemon, message: bytes) -> None:
    daemon.exporter.has_room = False
    daemon.reload("log: {level: debug}")
    daemon.look()
    assert daemon.exporter.told == []
    daemon.exporter.has_room = True
    for _ in range(3):
        daemon.look()
    daemon.reloads.handle_message(ALIVE)
    assert daemon.exporter.told == [("debug", 0.25)]
    assert daemon.steps == ["begins"]
    daemon.reloads.handle_message(message)
    assert daemon.steps == ["begins", "ends"]
    assert daemon.reloads.was_successful == (message == RELOADED)


def test_an_exporter_that_is_lost_is_not_waited_for(daemon: Daemon) -> None:
    """The next exporter begins with the configuration that is in force."""
    daemon.reload("log: {level: debug}")
    daemon.reloads.advance(None)
    assert daemon.steps == ["begins", "ends"]
    assert daemon.reloads.was_successful
    daemon.reloads.handle_message(NOT_RELOADED)
    assert daemon.steps == ["begins", "ends"]


def test_an_exporter_that_never_answers_is_not_waited_for(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reload, "ANSWER_SECONDS", 0.0)
    daemon.reload("log: {level: debug}")
    time.sleep(0.01)
    daemon.look()
    assert daemon.steps == ["begins", "ends"]
    assert not daemon.reloads.was_successful
    assert "the exporter did not answer" in caplog.messages[-1]
    daemon.reload("")
    daemon.reloads.handle_message(RELOADED)
    assert daemon.reloads.was_successful


def test_without_an_exporter_it_is_done_at_once(daemon: Daemon) -> None:
    daemon.reloads.request()
    daemon.reloads.advance(None)
    assert daemon.steps == ["begins", "ends"]


def test_one_after_another(daemon: Daemon) -> None:
    daemon.reload("log: {level: debug}")
    daemon.reload("log: {level: error}")
    daemon.reload("log: {level: warning}")
    assert daemon.exporter.told == [("debug", 0.25)]
    daemon.reloads.handle_message(RELOADED)
    daemon.look()
    assert daemon.exporter.told == [("debug", 0.25), ("warning", 0.25)]
    daemon.reloads.handle_message(RELOADED)
    daemon.look()
    assert daemon.steps == ["begins", "ends"] * 2
