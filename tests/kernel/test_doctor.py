"""lockd on a host that lacks something: doctor says what and why, and lockd does without where it can.

The tests hide what the host has in a mount namespace.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.lockd_process import CHECKOUT, ROOT, Lockd
from tests.support.workload import Start

pytestmark = pytest.mark.untimed

WITH_TRACEFS = "mountpoint -q /sys/kernel/tracing || mount -t tracefs nodev /sys/kernel/tracing"
WITHOUT_BTF = "mount -t tmpfs none /sys/kernel/btf"
WITHOUT_TRACEFS = """
for place in /sys/kernel/tracing /sys/kernel/debug/tracing /sys/kernel/debug; do
    while mountpoint -q "$place"; do umount -l "$place"; done
done
[ ! -e /sys/kernel/tracing/events ]
"""
WITHOUT_SYS_ADMIN = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")


def where(script: str) -> tuple[str, ...]:
    """Return the words that run a command in a mount namespace of its own, after `script` has run there."""
    return ("unshare", "--mount", "sh", "-ec", script + '\nexec "$@"', "-")


def doctor(*before: str) -> tuple[int, dict[str, str], str]:
    """Run `lockd doctor`. Returns its exit code, what it says about the host by subject, and its output."""
    command = [*before, *CHECKOUT, "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.partition("\n\n")[0].splitlines()
    return done.returncode, {line[:11].strip(): line[12:] for line in lines}, done.stdout + done.stderr


def test_a_host_that_has_everything() -> None:
    code, words, everything = doctor(*where(WITH_TRACEFS))
    assert code == 0, everything
    assert {words[what] for what in ("privileges", "BTF", "rings", "tracefs", "bcc")} == {"yes"}


def test_without_btf_nothing_runs() -> None:
    code, words, everything = doctor(*where(WITHOUT_BTF))
    assert code == 3, everything
    assert words["BTF"].startswith("no: ")
    for part in ("/sys/kernel/btf/vmlinux", "built without BTF", "CONFIG_DEBUG_INFO_BTF", "offsets"):
        assert part in words["BTF"]
    assert words["tracefs"].startswith("yes")
    assert "nothing can run here" in everything


def test_run_without_btf_says_the_same() -> None:
    command = [*where(WITHOUT_BTF), *CHECKOUT, "run", "--web.listen-address=127.0.0.1:0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "/sys/kernel/btf/vmlinux" in done.stderr
    assert "Traceback" not in done.stderr


def test_tracefs_is_mounted_for_lockd_alone(tmp_path: Path, workload: Start) -> None:
    code, words, everything = doctor(*where(WITHOUT_TRACEFS))
    assert code == 0, everything
    assert words["tracefs"].startswith("yes: not mounted")
    _, _, usually = doctor()
    assert everything.partition("PROGRAM")[2] == usually.partition("PROGRAM")[2]

    daemon = Lockd(tmp_path, program=[*where(WITHOUT_TRACEFS), *CHECKOUT])
    try:
        one = workload("mutex_handover", 20, 1000)
        truth = one.run()["futex"]["lock"]
        metrics = daemon.metrics()
        one.finish()
    finally:
        code = daemon.stop()
    assert code == 0, "".join(daemon.log)
    labels = {"comm": one.comm, "kind": "lock"}
    assert metrics.sum("lockd_futex_blocked_seconds_count", **labels) == truth["blocked"] == 20


def test_without_the_right_to_mount_it_doctor_says_how() -> None:
    """The exit code is 0: only the count of futex calls needs tracefs, and is not made by default."""
    code, words, everything = doctor(*where(WITHOUT_TRACEFS), *WITHOUT_SYS_ADMIN)
    assert code == 0, everything
    assert words["privileges"] == "yes"
    for part in ("not mounted", "Operation not permitted", "mount -t tracefs nodev /sys/kernel/tracing"):
        assert part in words["tracefs"]
        assert re.search(rf"^futex calls: +cannot be measured here .*: tracefs: .*{part}", everything, re.M)
