"""SIGHUP to a real daemon: the changes that all its processes take while it counts, and those it refuses."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kernel.test_adoption import counters, ended, fallen
from tests.kernel.test_signals import child_of, until
from tests.needs import need
from tests.support.checks import until_names_come
from tests.support.descriptor_store import ROOMY, DescriptorStore
from tests.support.lockd_process import CHECKOUT, PERIOD, ROOT, Lockd, Metrics
from tests.support.service_manager import Service
from tests.support.workload import BUILD, Start, Workload

pytestmark = pytest.mark.untimed

WAITS = "lockd_futex_waits_total"
SECONDS = 6
ELF_CLASS_AT = 4
"""The offset at which an ELF file says whether it is of 64 bits. The kernel does not look at it."""
SOONER = """
import dataclasses, sys
from lockd import cli
from lockd.service import daemon
from lockd.sample import sampler
sampler.HOUSEKEEPING_SECONDS = 0.3
settings_of = daemon.sampler_settings
def sooner(config):
    settings = settings_of(config)
    return dataclasses.replace(settings, limits=dataclasses.replace(settings.limits, idle_seconds=1.0))
daemon.sampler_settings = sooner
sys.exit(cli.main())
"""
"""Runs lockd so that series are retired after a second. The default is an hour; one can configure no less
than a minute."""


@pytest.fixture
def store(tmp_path: Path, host: None) -> Iterator[DescriptorStore]:
    kept = DescriptorStore(tmp_path)
    yield kept
    kept.close()


@pytest.fixture
def lockd(store: DescriptorStore, tmp_path: Path) -> Iterator[Lockd]:
    daemon = store.start(tmp_path)
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


def write(directory: Path, config: dict[str, Any]) -> None:
    """Write a configuration to the daemon's file, over the same defaults as when it was started."""
    budget = {"cpu": None, "requests": None, **config.get("budget", {})}
    text = yaml.safe_dump({"period": PERIOD, **ROOMY, **config, "budget": budget})
    (directory / "lockd.yaml").write_text(text)


def reload(lockd: Lockd, directory: Path, config: dict[str, Any]) -> Metrics:
    """Have the daemon take a configuration; return the metrics afterwards."""
    write(directory, config)
    return again(lockd)


def again(lockd: Lockd) -> Metrics:
    before = lockd.metrics(settled=False).sum("lockd_config_last_reload_success_timestamp_seconds")
    lockd.process.send_signal(signal.SIGHUP)
    return lockd.until(lambda now: now.sum("lockd_config_last_reload_success_timestamp_seconds") > before, 20)


def test_counts_are_exact_over_reloads_under_load(lockd: Lockd, tmp_path: Path, workload: Start) -> None:
    """Filter, windows, period, budget and log level change again and again. Counts do not depend on them."""
    one = workload("storm", 2, SECONDS, 1, 50)
    configs: list[dict[str, Any]] = [
        {"filter": {"exclude_comms": ["nobody"]}, "windows": ["10s", "5m"], "period": "20ms"},
        {"filter": {"comms": [f"{one.comm[:5]}*"]}, "log": {"level": "debug"}, "windows": ["1m"]},
        {"series": {"idle": "2h"}, "budget": {"cpu": "100%", "requests": "100%"}},
        {},
    ]
    one.go()
    told = counters(lockd)
    for config in configs * 2:
        reload(lockd, tmp_path, config)
        before, told = told, counters(lockd)
        assert fallen(before, told) == {}
    truth = one.truth()["futex"]["lock"]
    metrics = lockd.metrics()
    for name, of_all in ((WAITS, truth["waits"]), ("lockd_futex_blocked_seconds_count", truth["blocked"])):
        counted = metrics.sum(name, comm=one.comm, kind="lock")
        assert of_all - metrics.not_told <= counted <= of_all, name
    assert {labels["window"] for labels in metrics.labels("lockd_futex_max_blocked_us")} == {"1m", "5m"}
    assert metrics.sum("lockd_namer_restarts_total") == metrics.sum("lockd_exporter_restarts_total") == 0


def test_systemd_is_told_when_it_begins_and_when_it_ends(
    store: DescriptorStore, lockd: Lockd, tmp_path: Path
) -> None:
    until(lambda: any("READY=1" in one for one in store.told), "it is ready")
    for config, status in (({"perid": "1s"}, "; the last reload failed"), ({}, "")):
        store.told.clear()
        write(tmp_path, config)
        lockd.process.send_signal(signal.SIGHUP)
        until(lambda: any("READY=1" in one for one in store.told), "the end of the reload is told")
        first, *_, last = [one for one in store.told if "RELOADING" in one or "READY" in one]
        assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", first)
        assert int(first.rpartition("=")[2]) <= time.monotonic_ns() // 1000
        assert last == f"READY=1\nSTATUS=sampling; metrics on {lockd.address}{status}"


def test_a_wrong_file_changes_nothing(lockd: Lockd, tmp_path: Path, workload: Start) -> None:
    before = lockd.metrics()
    write(tmp_path, {"filter": {"comms": ["nobody"]}, "log": {"level": "error"}, "maps": {"entries": 3}})
    lockd.process.send_signal(signal.SIGHUP)
    lockd.until(lambda now: now.sum("lockd_config_last_reload_successful") == 0, 20)
    one = workload("mutex_handover", 50, 1000)
    assert one.run()["futex"]["lock"]["waits"] == 50
    metrics = lockd.metrics()
    assert metrics.sum(WAITS, comm=one.comm, kind="lock") == 50, "the filter is the old one"
    since = "lockd_config_last_reload_success_timestamp_seconds"
    assert metrics.sum(since) == before.sum(since)
    (line,) = [line for line in lockd.log if " error " in line]
    expected = f"the configuration before this one stays in force: {tmp_path}/lockd.yaml:"
    assert expected in line
    assert "maps.entries: 3 is not a power of two from 64 to 1048576" in line
    assert again_right(lockd, tmp_path)


def again_right(lockd: Lockd, tmp_path: Path) -> bool:
    metrics = reload(lockd, tmp_path, {})
    return metrics.sum("lockd_config_last_reload_successful") == 1 and any(
        "the configuration was read again; changed: nothing that can be taken now" in line
        for line in lockd.log
    )


def test_what_waits_for_a_restart_is_named(lockd: Lockd, tmp_path: Path, workload: Start) -> None:
    one = workload("mutex_handover", 50, 1000)
    config = {
        "programs": {"futex": {"enabled": False, "mode": "calls"}},
        "maps": {"entries": 1024},
        "log": {"level": "warning"},
    }
    metrics = reload(lockd, tmp_path, config)
    assert metrics.sum("lockd_config_keys_waiting") == 2
    assert metrics.sum("lockd_config_last_reload_successful") == 1
    assert lockd.log[-1].endswith("programs.futex.enabled, maps.entries: take effect at a restart\n")
    one.run()
    assert lockd.metrics().sum(WAITS, comm=one.comm, kind="lock") == 50, "the program runs on"
    assert reload(lockd, tmp_path, {}).sum("lockd_config_keys_waiting") == 0


def test_what_a_filter_leaves_out_stands_still_and_goes_on(lockd: Lockd, tmp_path: Path) -> None:
    comm = f"left.{os.getpid():x}"
    runs = [Workload("mutex_handover", count, 1000, comm=comm) for count in (30, 50, 70)]
    stuck = Workload("stuck_mutex", comm=comm)
    try:
        stuck.run()
        runs[0].run()
        lockd.until(lambda now: now.sum("lockd_futex_waiting", comm=comm, kind="lock") == 1, 20)
        metrics = lockd.metrics()
        first = metrics.sum(WAITS, comm=comm, kind="lock")
        assert 30 - metrics.not_told <= first <= 30
        reload(lockd, tmp_path, {"filter": {"exclude_comms": [comm]}})
        runs[1].run()
        lockd.until(lambda now: now.sum("lockd_futex_waiting", comm=comm, kind="lock") == 0, 20)
        assert lockd.metrics().sum(WAITS, comm=comm, kind="lock") == first
        reload(lockd, tmp_path, {})
        runs[2].run()
        lockd.until(lambda now: now.sum("lockd_futex_waiting", comm=comm, kind="lock") == 1, 20)
        metrics = lockd.metrics()
        in_all = metrics.sum(WAITS, comm=comm, kind="lock")
        assert first + 70 - metrics.not_told <= in_all <= first + 70
    finally:
        for one in (*runs, stuck):
            one.kill()


def test_what_a_filter_leaves_out_is_retired_though_it_lives(host: None, tmp_path: Path) -> None:
    """The series are retired like those of a process that has ended: lockd_retired_value has their counts."""
    lockd = Lockd(tmp_path, ROOMY, program=["/usr/bin/python3", "-c", SOONER])
    comm = f"gone.{os.getpid():x}"
    runs = [Workload("mutex_handover", 30, 1000, comm=comm) for _ in range(2)]
    try:
        runs[0].run()
        assert lockd.metrics().sum(WAITS, comm=comm, kind="lock") == 30
        time.sleep(2)
        assert lockd.metrics().sum(WAITS, comm=comm, kind="lock") == 30, "it lives"
        reload(lockd, tmp_path, {"filter": {"exclude_comms": [comm]}})
        metrics = lockd.until(lambda now: not now.labels(WAITS, comm=comm), 20)
        assert metrics.sum("lockd_retired_value", metric=WAITS) >= 30
        reload(lockd, tmp_path, {})
        runs[1].run()
        assert lockd.metrics().sum(WAITS, comm=comm, kind="lock") == 60, "it goes on where it was"
    finally:
        for one in runs:
            one.kill()
        ended(lockd)


def test_another_budget(lockd: Lockd, tmp_path: Path, workload: Start) -> None:
    workload("storm", 2, 60, 1, 50).go()
    metrics = reload(lockd, tmp_path, {"budget": {"cpu": "0.01%"}})
    assert metrics.sum("lockd_cpu_budget_ratio") == 0.0001
    lockd.until(lambda now: now.sum("lockd_restraint_level") > 0, 40)
    metrics = reload(lockd, tmp_path, {})
    assert metrics.sum("lockd_cpu_budget_ratio") == float("inf")
    assert metrics.sum("lockd_restraint_level") == 0


def test_the_level_of_the_log_is_that_of_all_processes(lockd: Lockd, tmp_path: Path, workload: Start) -> None:
    """Two things are logged at debug only: by the exporter what is no HTTP, and by the namer a program that
    it cannot read.

    At the end of a reload, the level may still be on its way to the namer. What the namer is asked later
    comes after it.
    """
    strange_things(lockd, tmp_path / "one")
    reload(lockd, tmp_path, {"log": {"level": "debug"}})
    until_names_come(lockd, workload("timed_wait", 10))
    strange_things(lockd, tmp_path / "two")
    until(lambda: "two has no symbols" in "".join(lockd.log), "the namer is at debug")
    until(lambda: "Malformed HTTP message" in "".join(lockd.log), "the exporter is at debug")
    said = "".join(lockd.log)
    assert "one has no symbols" not in said
    assert said.count("Malformed HTTP message") == 1
    reload(lockd, tmp_path, {"log": {"level": "error"}})
    until_names_come(lockd, workload("timed_wait", 10))
    write(tmp_path, {"period": "20ms", "log": {"level": "error"}})
    before = len(lockd.log)
    again(lockd)
    strange_things(lockd, tmp_path / "three")
    said = "".join(lockd.log[before:])
    for line in ("three has no symbols", "Malformed HTTP message", "the configuration was read again"):
        assert line not in said
    os.kill(child_of(lockd.process.pid, b"lockd.export"), signal.SIGKILL)
    until(lambda: "exporter: ended by SIGKILL" in "".join(lockd.log), "another exporter")
    lockd.until(lambda now: now.sum("lockd_exporter_restarts_total") == 1, 20)
    assert not [line for line in lockd.log[before:] if " info " in line], "it begins with the new level"


def strange_things(lockd: Lockd, program: Path) -> None:
    host, port = lockd.address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as one:
        one.sendall(b"nonsense\r\n\r\n")
        one.recv(1000)
    shutil.copy(BUILD / "mutex_handover", program)
    with program.open("r+b") as file:
        file.seek(ELF_CLASS_AT)
        file.write(b"\x09")
    one_of = Workload(str(program), 20, 1000, comm=program.name)
    one_of.run()
    lockd.settle()  # the namer reads the file while the process lives
    one_of.kill()


def test_the_web_configuration_is_read_at_once(store: DescriptorStore, tmp_path: Path) -> None:
    """A reload reads the file without a request that would have it read, and fails if the file is wrong."""
    web = Path("/var/tmp") / f"lockd-reload-{os.getpid()}.yml"
    web.write_text("{}")
    web.chmod(0o644)
    lockd = store.start(tmp_path, {"web": {"config_file": str(web)}})
    try:
        lockd.metrics()
        web.write_text("http_server_config: {headers: {X-Frame-Options: nonsense}}")
        lockd.process.send_signal(signal.SIGHUP)
        until(lambda: "the previous web configuration stays in use" in "".join(lockd.log), "said")
        lockd.until(lambda now: now.sum("lockd_config_last_reload_successful") == 0, 20)
        web.write_text("http_server_config: {headers: {X-Frame-Options: deny}}")
        again(lockd)
        assert f"{web}: read again, because" in "".join(lockd.log)
    finally:
        ended(lockd)
        web.unlink()


def test_a_terminal_that_is_gone_ends_it(tmp_path: Path, host: None) -> None:
    """A daemon that went on could be ended by nobody's Ctrl-C, and would keep the port."""
    ours, theirs = os.openpty()
    # Whoever runs the tests may have started them by nohup, so that SIGHUP is ignored.
    program = ["setsid", "--ctty", "env", "--default-signal=HUP", *CHECKOUT]
    lockd = Lockd(tmp_path, program=program, stdin=theirs, cwd=ROOT)
    os.close(theirs)
    try:
        reload(lockd, tmp_path, {})
        os.close(ours)
        assert lockd.process.wait(20) == 0, "".join(lockd.log)
    finally:
        ended(lockd)


def test_nohup_has_it_go_on_without_its_terminal(tmp_path: Path, host: None) -> None:
    ours, theirs = os.openpty()
    lockd = Lockd(tmp_path, program=["setsid", "--ctty", "nohup", *CHECKOUT], stdin=theirs, cwd=ROOT)
    os.close(theirs)
    try:
        os.close(ours)
        until(lambda: "the configuration was read again" in "".join(lockd.log), "read again")
        lockd.metrics()
    finally:
        ended(lockd)


def test_systemctl_reload(host: None, tmp_path: Path, workload: Start) -> None:
    """`systemctl reload` returns when all is taken. It fails for a wrong file, and the service goes on."""
    need("systemctl")
    service = Service(tmp_path)
    try:
        service.systemctl("start")
        one, other, third = (workload("mutex_handover", 30, 1000) for _ in range(3))
        pid, kept = service.pid, yaml.safe_load(service.config.read_text())

        service.config.write_text(
            yaml.safe_dump({**kept, "filter": {"exclude_comms": [one.comm, other.comm]}})
        )
        service.systemctl("reload")
        one.run()
        assert service.metrics().sum(WAITS, comm=one.comm) == 0
        assert "the configuration was read again; changed: filter.exclude_comms" in service.said()

        service.config.write_text("perid: 10ms")
        service.systemctl("reload", succeeds=False)
        assert service.show("ActiveState") == "active"
        other.run()
        metrics = service.metrics()
        assert metrics.sum(WAITS, comm=other.comm) == 0, "the filter is still in force"
        assert metrics.sum("lockd_config_last_reload_successful") == 0
        assert service.said().count('perid: unknown key; did you mean "period"?') == 2, "by daemon and check"

        service.config.write_text(yaml.safe_dump(kept))
        service.systemctl("reload")
        third.run()
        metrics = service.metrics()
        assert metrics.sum(WAITS, comm=third.comm, kind="lock") == 30
        assert metrics.sum("lockd_config_last_reload_successful") == 1
        assert service.pid == pid
    finally:
        service.close()
