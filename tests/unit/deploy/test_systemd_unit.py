"""Tests of the systemd unit: systemd accepts it, each setting has a reason, the sandbox gets no weaker."""

from __future__ import annotations

import configparser
import subprocess
from pathlib import Path

import pytest

from tests.needs import PACKAGES, needs

UNIT = Path(__file__).parents[3] / "deploy" / "systemd" / "lockd.service"

needs_systemd = needs("systemd-analyze")


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    """Return the unit with a program that this host has, because systemd checks that the program exists."""
    unit = tmp_path / "lockd.service"
    unit.write_text(UNIT.read_text().replace("=/usr/bin/lockd", "=/bin/true"))
    return unit


def settings() -> dict[str, list[str]]:
    """Return the values of each setting of the unit, one for each line that sets it."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@needs_systemd
def test_systemd_accepts_it(runnable: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(runnable)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "lockd.service" not in done.stderr  # other units of this host may cause messages
    assert done.returncode == 0, done.stderr


@needs_systemd
def test_it_stays_as_closed_as_it_is(runnable: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=39", str(runnable)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_runs_what_the_contract_says() -> None:
    unit = settings()
    assert unit["Type"] == ["notify"]
    assert unit["NotifyAccess"] == ["main"]
    assert unit["WatchdogSec"] == ["30s"]
    assert unit["Restart"] == ["on-failure"]
    assert unit["ExecStart"] == ["/usr/bin/lockd run --config.file=/etc/lockd/lockd.yaml"]
    assert unit["ExecReload"] == [
        "/bin/kill -HUP $MAINPID",
        "/usr/bin/lockd check --quiet --config.file=/etc/lockd/lockd.yaml",
    ]
    assert unit["LimitMEMLOCK"] == ["infinity"]
    assert (unit["MemoryMax"], unit["OOMPolicy"], unit["TasksMax"]) == (["1G"], ["continue"], ["64"])


def test_every_program_that_it_runs_is_installed_with_lockd() -> None:
    root = UNIT.parents[2]
    packages = subprocess.check_output(["make", "-s", "packages"], cwd=root, text=True).split()
    commands = [line for name, lines in settings().items() if name.startswith("Exec") for line in lines]
    programs = {Path(command.split()[0]).name for command in commands} - {"lockd"}
    assert programs
    assert {PACKAGES[program] for program in programs} <= set(packages)


def test_it_has_the_capabilities_it_explains_and_no_others() -> None:
    unit = settings()
    granted = set(" ".join(unit["CapabilityBoundingSet"]).split())
    explained = {
        word
        for line in UNIT.read_text().splitlines()
        if line.startswith("# CAP_")
        for word in line.partition(":")[0].removeprefix("# ").split(", ")
    }
    assert granted == explained
    assert "AmbientCapabilities" not in unit


@pytest.mark.parametrize(
    ("setting", "hidden"),
    [
        ("ProtectKernelTunables", "tracefs and /proc/kallsyms"),
        ("ProtectKernelLogs", "addresses in /proc/kallsyms, for which it takes CAP_SYSLOG"),
        ("PrivateTmp", "/tmp/perf-PID.map"),
        ("ProtectHostname", "the host's name after `hostnamectl set-hostname`"),
        ("PrivateUsers", "capabilities towards other processes"),
        ("PrivateNetwork", "Prometheus"),
    ],
)
def test_nothing_hides_what_lockd_reads(setting: str, hidden: str) -> None:
    assert settings().get(setting, ["no"]) == ["no"], f"hides {hidden}"


def test_every_line_but_the_obvious_has_a_reason() -> None:
    obvious = {"Description", "ExecStart", "Restart", "WantedBy"}
    explained = False
    for line in UNIT.read_text().splitlines():
        if line.startswith("#"):
            explained = len(line) > 10
        elif not line or line.startswith("["):
            explained = False
        elif line.partition("=")[0] not in obvious:
            assert explained, f"no comment above: {line}"


def test_no_setting_is_given_twice_by_mistake() -> None:
    several = {name for name, values in settings().items() if len(values) > 1}
    assert several == {"CapabilityBoundingSet", "ExecReload", "SystemCallFilter"}
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read(UNIT)
    assert parser.sections() == ["Unit", "Service", "Install"]
