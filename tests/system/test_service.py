"""lockd as a service of a real systemd: from boot to stop, in the order of a machine's life.

All tests share one machine. A failure of type VmLost says that the machine stopped answering, and nothing
about lockd.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.machine.qemu import Machine
from tests.needs import need
from tests.system.guest import booted
from tests.vm.emulator import need_emulator

pytestmark = pytest.mark.timeout(1800)

URL = "http://127.0.0.1:9776"
START_SECONDS = 240
"""The time that a start may take in the machine. It compiles for half a minute there, and longer beside a
busy neighbour."""
ANY_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL: the guest's clock is not the host's."""
CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38, "CAP_BPF": 39}

USERS = {"sampler": "root", "namer": "lockd-namer", "exporter": "lockd"}
MOST_EXPOSED = "39"
"""The largest exposure allowed, on systemd's scale from 0 to 10, in tenths."""
NOT_UNDER_SYSTEMD = ("calls_of_another_kind", "the_journal", "without_the_library", "kernel_takes_no_filter")
"""Tests of the confinement that are left out: the unit's own sandbox refuses what the first two do before
lockd's can, and the others are not about what a process may do."""
ACTS_UNIT = f"""[Service]
Type=oneshot
Restart=no
WatchdogSec=0
TimeoutStartSec=infinity
ExecStart=
ExecStart=/usr/bin/python3 -m pytest -q -p no:cacheprovider -o timeout=0 \\
  -k 'not {" and not ".join(NOT_UNDER_SYSTEMD)}' tests/unit/process/test_confinement.py
WorkingDirectory=/usr/lib/lockd-tests
# For the files that are not to be written to.
ReadWritePaths=/var/tmp
Environment=TMPDIR=/var/tmp PYTHONDONTWRITEBYTECODE=1
"""
"""Settings for a copy of lockd's unit, with the tests of the confinement in place of lockd."""

MOST_MB = 95.0
"""The most memory (Pss, in MB) that all processes of lockd may have together. It is 76 with Python 3.11."""


@pytest.fixture(scope="module")
def guest() -> Iterator[Machine]:
    need_emulator()
    need("systemctl", "systemd-sysusers", "openssl")
    with booted() as machine:
        yield machine


def until(
    guest: Machine, holds: Callable[[], bool], what: str | Callable[[], str], seconds: float = START_SECONDS
) -> None:
    deadline = guest.seconds + seconds
    while not holds():
        assert guest.seconds < deadline, (
            f"not within {seconds:g} s: {what if isinstance(what, str) else what()}"
        )
        time.sleep(1)


def show(guest: Machine, name: str) -> str:
    """Return a property of the service."""
    return guest.shell(f"systemctl show lockd -p {name} --value")


def is_active(guest: Machine) -> bool:
    return show(guest, "ActiveState") == "active"


def processes(guest: Machine) -> dict[str, int]:
    """Return the process ids of the sampler, the namer and the exporter, if they live."""
    script = (
        "for p in $(cat /sys/fs/cgroup/system.slice/lockd.service/cgroup.procs); do"
        ' echo "$p $(tr "\\0" " " <"/proc/$p/cmdline")"; done'
    )
    found = {}
    for line in guest.shell(script).splitlines():
        pid, _, command = line.partition(" ")
        children = {"lockd.export": "exporter", "lockd.names": "namer"}
        found[next((name for module, name in children.items() if module in command), "sampler")] = int(pid)
    return found


def programs(guest: Machine) -> list[str]:
    """Return the names of the BPF programs that trace. systemd itself has some of other types."""
    loaded = json.loads(guest.shell("bpftool prog show -j"))
    return sorted(one["name"] for one in loaded if "trace" in one["type"] or one["type"] == "kprobe")


def journal(guest: Machine, *arguments: str) -> list[dict[str, str]]:
    done = guest.run("journalctl", "-u", "lockd", "-o", "json", "--no-pager", *arguments)
    assert done.code == 0, done.out
    return [json.loads(line) for line in done.out.splitlines()]


def samples(guest: Machine, **labels: str) -> dict[str, float]:
    """Return the sum of each metric over its series that have these labels."""
    answer = guest.get(f"{URL}/metrics")
    assert answer.code == 0, answer.out
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.out):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def test_it_is_active_after_boot(guest: Machine) -> None:
    until(guest, lambda: is_active(guest), "active")
    assert show(guest, "NRestarts") == "0"
    status = guest.run("systemctl", "status", "--no-pager", "lockd").out
    assert "Active: active (running)" in status
    assert 'Status: "sampling; metrics on 127.0.0.1:9776"' in status


def confined(guest: Machine) -> set[str]:
    """Return the processes that have said that they are confined."""
    told = [entry for entry in journal(guest, "-b") if entry["MESSAGE"] == "confined from now on"]
    return {entry["LOCKD_PROCESS"] for entry in told}


def test_journal_has_fields_of_all_processes(guest: Machine) -> None:
    # The namer may be the last process to be confined, as nothing has needed it so far.
    until(guest, lambda: confined(guest) == {"exporter", "namer"}, "both are confined", 60)
    own = [entry for entry in journal(guest, "-b") if entry["_PID"] != "1"]
    assert {entry["SYSLOG_IDENTIFIER"] for entry in own} == {"lockd"}
    assert {entry["LOCKD_PROCESS"] for entry in own} == {"sampler", "exporter", "namer"}
    attached = [entry for entry in own if re.search(r"attached \d+ of \d+ hooks", entry["MESSAGE"])]
    assert [(entry["PRIORITY"], entry["LOCKD_PROCESS"]) for entry in attached] == [("6", "sampler")]
    assert attached[0]["MESSAGE"].startswith("attached"), "level and logger are fields, not part of the words"


def test_no_process_keeps_what_loading_needed(guest: Machine) -> None:
    release = tuple(int(number) for number in guest.shell("uname -r").split("-")[0].split(".")[:2])
    pids = processes(guest)
    assert set(pids) == {"sampler", "namer", "exporter"}
    filters = {}
    for name, pid in pids.items():
        texts = guest.shell(f"cat /proc/{pid}/task/*/status").split("Name:")[1:]  # of each thread
        assert texts
        for text in texts:
            status = dict(re.findall(r"^(\w+):\s*(.*)$", text, re.MULTILINE))
            for which in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
                bits = int(status[which], 16)
                if name == "exporter":
                    assert bits == 0, which
                elif name == "namer" or release >= (5, 19):
                    assert not [cap for cap, bit in CAPABILITIES.items() if bits >> bit & 1], which
        assert status["NoNewPrivs"] == "1"
        assert set(status["Uid"].split()) == {guest.shell(f"id -u {USERS[name]}")}
        filters[name] = int(status["Seccomp_filters"])
    # All processes have the unit's own filters. Those that read what others wrote have one more.
    assert filters["namer"] == filters["exporter"] == filters["sampler"] + 1 > 1


def test_a_workload_in_the_guest_is_measured(guest: Machine) -> None:
    """The program runs for some seconds, as the namer of a slow guest may need one of them to look at it."""
    hold_us = 250_000
    command = f"printf g | LOCKD_COMM=handed_over /usr/lib/lockd-tests/mutex_handover 20 {hold_us}"
    truth = json.loads(guest.shell(command).splitlines()[-1])["futex"]["lock"]
    labels = {"comm": "handed_over", "unit": "lockd-agent.service"}
    until(guest, lambda: guest.get(f"{URL}/-/settled").code == 0, "all that has happened counted", 60)
    seen = samples(guest, **labels)
    of_lock = samples(guest, kind="lock", **labels)
    assert of_lock["lockd_futex_blocked_seconds_count"] == truth["blocked"] == 20
    assert "lockd_futex_waits_total" not in of_lock, "which only mode calls counts"
    # By construction no wait is shorter than a hold; the program's own clock covers the whole call.
    least = 20 * hold_us / 1e6
    assert least <= of_lock["lockd_futex_blocked_seconds_sum"] <= truth["blocked_us"] / 1e6
    assert seen["lockd_offcpu_blocked_seconds_count"] >= 20
    assert seen["lockd_offcpu_blocked_seconds_sum"] >= least

    def is_named() -> bool:
        return [row["lock"] for row in handed_over_locks(guest)] == ["mutex_handover:handover_mutex"]

    until(guest, is_named, lambda: f"the name of the lock: {handed_over_locks(guest)}", 60)


def handed_over_locks(guest: Machine) -> list[dict[str, object]]:
    """Return what lockd knows of the workload's mutex."""
    answer = guest.get(f"{URL}/api/v1/locks?comm=handed_over&kind=lock")
    rows = json.loads(answer.out)["locks"] if answer.code == 0 else []
    return [row for row in rows if row["program"] == "futex"]


def test_it_is_small(guest: Machine) -> None:
    """The processes of lockd together are small, though only the agent shares Python's memory with them. The
    namer has read its files by now."""
    shares = {}
    for name, pid in processes(guest).items():
        lines = guest.shell(f"cat /proc/{pid}/smaps_rollup")
        shares[name] = {kind: int(kb) / 1000 for kind, kb in re.findall(r"^(Pss\w*):\s*(\d+)", lines, re.M)}
    assert sum(share["Pss"] for share in shares.values()) < MOST_MB, shares


def test_it_is_as_closed_as_it_says(guest: Machine) -> None:
    done = guest.run("systemd-analyze", "security", "--no-pager", f"--threshold={MOST_EXPOSED}", "lockd")
    assert done.code == 0, done.out


@pytest.mark.thorough("takes the emulated machine more than a minute; without systemd it is in tests/unit")
def test_in_its_sandbox_no_process_does_what_it_may_not(guest: Machine) -> None:
    """The tests of the confinement pass where systemd starts them in place of lockd."""
    directory = "/run/systemd/system"
    unit = f"{directory}/lockd-acts.service"
    guest.shell(f"mkdir -p {unit}.d && cp /usr/lib/systemd/system/lockd.service {unit}")
    guest.put(f"{unit}.d/acts.conf", ACTS_UNIT.encode(), 0o644)
    guest.shell("systemctl daemon-reload")
    done = guest.run("systemctl", "start", "lockd-acts", seconds=900)
    log = guest.shell("journalctl -u lockd-acts -b -o cat --no-pager")
    assert done.code == 0, log
    passed = re.search(r"^(\d+) passed, (\d+) deselected", log, re.MULTILINE)
    assert passed, log
    assert int(passed[1]) >= 20, log


def test_another_exporter_comes_and_counts_go_on(guest: Machine) -> None:
    before = processes(guest)
    waits = samples(guest, comm="handed_over")["lockd_futex_blocked_seconds_count"]
    guest.shell(f"kill -KILL {before['exporter']}")
    old = before["exporter"]
    until(guest, lambda: processes(guest).get("exporter", old) != old, "another exporter", 60)
    until(guest, lambda: guest.get(f"{URL}/-/ready").code == 0, "answers", 60)
    assert processes(guest)["sampler"] == before["sampler"]
    assert samples(guest, comm="handed_over")["lockd_futex_blocked_seconds_count"] == waits
    assert is_active(guest)


def handed_over(guest: Machine, waits: int) -> float:
    """Let a workload wait `waits` times. Return the number of waits counted in all its runs."""
    guest.shell(f"printf g | LOCKD_COMM=handed_over /usr/lib/lockd-tests/mutex_handover {waits} 2000")
    until(guest, lambda: guest.get(f"{URL}/-/settled").code == 0, "all that has happened counted", 60)
    return samples(guest, comm="handed_over", kind="lock").get("lockd_futex_blocked_seconds_count", 0)


def test_reload_takes_what_is_right_and_fails_for_what_is_wrong(guest: Machine) -> None:
    until(guest, lambda: is_active(guest), "active")
    file, before = "/etc/lockd/lockd.yaml", (show(guest, "MainPID"), show(guest, "NRestarts"))
    kept = guest.shell(f"cat {file}").encode()
    counted = handed_over(guest, 10)

    guest.put(file, b"filter: {exclude_comms: [handed_over]}\nlog: {level: debug}\nmaps: {entries: 1024}\n")
    done = guest.run("systemctl", "reload", "lockd", seconds=START_SECONDS)
    assert done.code == 0, done.out
    assert handed_over(guest, 10) == counted, "left out"
    told = samples(guest)
    assert (told["lockd_config_last_reload_successful"], told["lockd_config_keys_waiting"]) == (1, 1)
    words = [entry["MESSAGE"] for entry in journal(guest, "-b")]
    assert "the configuration was read again; changed: filter.exclude_comms, log.level" in words
    assert "maps.entries: takes effect at a restart" in words

    guest.put(file, b"perid: 10ms\n")
    done = guest.run("systemctl", "reload", "lockd", seconds=START_SECONDS)
    assert done.code != 0
    assert is_active(guest)
    until(guest, lambda: samples(guest)["lockd_config_last_reload_successful"] == 0, "told in a metric", 60)
    assert show(guest, "StatusText").endswith("; the last reload failed")
    words = [entry["MESSAGE"] for entry in journal(guest, "-b")]
    assert any(line.startswith("the configuration before this one stays in force: ") for line in words)
    assert handed_over(guest, 10) == counted, "the filter is still in force"

    guest.put(file, kept, mode=0o644)
    done = guest.run("systemctl", "reload", "lockd", seconds=START_SECONDS)
    assert done.code == 0, done.out
    assert handed_over(guest, 10) == counted + 10, "it goes on"
    assert (show(guest, "MainPID"), show(guest, "NRestarts")) == before


def test_a_sampler_that_hangs_is_started_again(guest: Machine) -> None:
    """The new sampler goes on where the old one was, with its programs and counts. The rest is in
    tests/kernel/test_service_restarts.py."""
    attached = programs(guest)
    waits = samples(guest, comm="handed_over")["lockd_futex_blocked_seconds_count"]
    pid = int(show(guest, "MainPID"))
    assert pid
    guest.shell(f"kill -STOP {pid}")
    until(
        guest,
        lambda: show(guest, "MainPID") not in ("0", str(pid)) and is_active(guest),
        "active again",
        START_SECONDS + 60,
    )
    log = guest.run("journalctl", "-u", "lockd", "-b", "--no-pager").out
    assert int(show(guest, "NRestarts")) == log.count("Watchdog timeout") == 1, log
    assert programs(guest) == attached, "one of each, as before"
    assert samples(guest, comm="handed_over")["lockd_futex_blocked_seconds_count"] == waits
    assert samples(guest, after="crash")["lockd_taken_over_total"] == 1


def test_stop_is_clean(guest: Machine) -> None:
    assert programs(guest)
    guest.shell("systemctl stop lockd")
    assert show(guest, "Result") == "success"
    assert (show(guest, "ExecMainCode"), show(guest, "ExecMainStatus")) == ("1", "0"), "exited with 0"
    assert programs(guest) == []
    assert show(guest, "NFileDescriptorStore") == "0"
    assert guest.get(f"{URL}/metrics").code == -1


def test_a_wrong_configuration_is_said_once(guest: Machine) -> None:
    guest.shell("cp /etc/lockd/lockd.yaml /root/ && echo 'perid: 10ms' >/etc/lockd/lockd.yaml")
    assert guest.run("systemctl", "start", "lockd", seconds=START_SECONDS).code != 0
    time.sleep(8)  # RestartSec and more
    assert (show(guest, "ActiveState"), show(guest, "ExecMainStatus")) == ("failed", "2")
    assert show(guest, "NRestarts") == "0"
    assert any("perid" in entry["MESSAGE"] and "period" in entry["MESSAGE"] for entry in journal(guest, "-b"))
    guest.shell("mv /root/lockd.yaml /etc/lockd/ && systemctl reset-failed lockd")


def test_ready_means_that_the_port_answers(guest: Machine) -> None:
    guest.shell("systemctl start --no-block lockd")
    stages: list[str] = []
    deadline = guest.seconds + START_SECONDS
    while True:  # as often as the guest can tell
        told = guest.shell("systemctl show lockd -p ActiveState,StatusText")
        now = dict(line.split("=", 1) for line in told.splitlines())
        stages.append(now["StatusText"])
        if now["ActiveState"] == "active":
            break
        assert guest.seconds < deadline, f"still {now}"
    answer = guest.get(f"{URL}/metrics")
    assert answer.code == 0, f"the first request after READY: {answer.out}"
    assert "compiling and attaching the BPF programs" in stages
    assert stages[-1].startswith("sampling")


def test_only_the_first_start_compiled(guest: Machine) -> None:
    """The first start, at boot, kept the programs in a directory that systemd made for root alone. The start
    after the watchdog loaded nothing."""
    words = [entry["MESSAGE"] for entry in journal(guest, "-b") if entry["_PID"] != "1"]
    starts = [line for line in words if "compiled" in line]
    assert starts[0].startswith("loader: compiled the BPF programs in")
    assert set(starts[1:]) == {
        "loader: the BPF programs were compiled by an earlier start and kept in /var/cache/lockd"
    }
    assert guest.shell("stat -c '%a %U' /var/cache/lockd").strip() == "700 root"


def test_the_key_for_tls_is_read_by_its_user_alone(guest: Machine, tmp_path: Path) -> None:
    """A start fails if the user lockd cannot read the key, and the message says so and what to do."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "3650", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    place = "/etc/lockd"
    guest.put(f"{place}/key.pem", key.read_bytes(), 0o400)
    guest.put(f"{place}/cert.pem", certificate.read_bytes(), 0o644)
    web = "tls_server_config: {cert_file: cert.pem, key_file: key.pem}\n"
    guest.put(f"{place}/web.yml", web.encode(), 0o644)
    override = "[Service]\nExecStart=\nExecStart=/usr/bin/lockd run --config.file=/etc/lockd/lockd.yaml"
    override += f" --web.config.file={place}/web.yml\n"
    guest.put("/etc/systemd/system/lockd.service.d/web.conf", override.encode(), 0o644)
    guest.shell("systemctl daemon-reload && systemctl stop lockd")
    assert guest.run("systemctl", "start", "lockd", seconds=START_SECONDS).code != 0
    assert show(guest, "ExecMainStatus") == "2"
    said = f"cannot read {place}/key.pem as user lockd: Permission denied; rule: chown lockd {place}/key.pem"
    assert any(said in entry["MESSAGE"] for entry in journal(guest, "-b"))
    guest.shell(f"install -o lockd -m 0400 {place}/key.pem {place}/new && mv {place}/new {place}/key.pem")
    guest.shell("systemctl start lockd", seconds=START_SECONDS)
    ask = (
        "import ssl, urllib.request;"
        f" trusted = ssl.create_default_context(cafile='{place}/cert.pem');"
        f" trusted.verify_flags |= {ANY_TIME};"
        " print(urllib.request.urlopen('https://127.0.0.1:9776/metrics', context=trusted).read().decode())"
    )
    assert "\nlockd_hook_attached{" in guest.shell(f'python3 -c "{ask}"')
