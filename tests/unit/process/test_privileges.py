"""Privileges that are given up are gone, as the kernel sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockd.process import privileges

ROOT = Path(__file__).resolve().parents[3]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives privileges up")


def run(script: str, *before: str) -> dict[str, str]:
    """Return the fields of /proc/self/status of a process after it has run `script`."""
    text = f"from lockd.process.privileges import *\n{script}\nprint(open('/proc/self/status').read())"
    done = subprocess.run(
        [*before, sys.executable, "-c", text],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)


def sets(status: dict[str, str]) -> dict[str, int]:
    names = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    return {name: int(status[name], 16) for name in names}


def test_names_are_the_kernels() -> None:
    assert privileges.NUMBERS["CAP_CHOWN"] == 0
    assert privileges.NUMBERS["CAP_SYS_PTRACE"] == 19
    assert privileges.NUMBERS["CAP_SYS_ADMIN"] == 21
    assert privileges.NUMBERS["CAP_SYSLOG"] == 34
    assert privileges.NUMBERS["CAP_PERFMON"] == 38
    assert privileges.NUMBERS["CAP_BPF"] == 39
    assert privileges.NUMBERS["CAP_CHECKPOINT_RESTORE"] == 40


def test_capabilities_are_what_the_kernel_says() -> None:
    status = Path("/proc/self/status").read_text()
    permitted = int(status.split("CapPrm:")[1].split()[0], 16)
    assert sum(1 << privileges.NUMBERS[name] for name in privileges.capabilities()) == permitted


@needs_root
def test_drop_all_leaves_nothing() -> None:
    status = run("drop_all('nobody')")
    assert set(sets(status).values()) == {0}
    assert status["NoNewPrivs"] == "1"
    assert set(status["Uid"].split()) == {"65534"}
    assert set(status["Gid"].split()) == {"65534"}
    assert status["Groups"].strip() == ""


@needs_root
def test_drop_all_of_an_ambient_capability_without_being_root() -> None:
    setpriv = ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=+syslog", "--ambient-caps=+syslog"]
    before = sets(run("", *setpriv))
    assert before["CapEff"] == before["CapAmb"] == 1 << privileges.NUMBERS["CAP_SYSLOG"]
    after = sets(run("drop_all()", *setpriv))
    # Only CAP_SETPCAP may cut the bounding set; with no_new_privs it gives nothing.
    assert {name: bits for name, bits in after.items() if name != "CapBnd"} == {
        "CapInh": 0,
        "CapPrm": 0,
        "CapEff": 0,
        "CapAmb": 0,
    }


@needs_root
def test_keep_only() -> None:
    kept = {"CAP_SYS_PTRACE", "CAP_SYSLOG"}
    status = run(f"keep_only({kept}); assert capabilities() == {kept}, capabilities()")
    bits = sum(1 << privileges.NUMBERS[name] for name in kept)
    assert sets(status) == {"CapInh": 0, "CapPrm": bits, "CapEff": bits, "CapBnd": bits, "CapAmb": 0}
    assert set(sets(run("keep_only(set())")).values()) == {0}


@needs_root
def test_programs_inherit_what_they_are_to_have_whoever_the_user_is() -> None:
    status = run(
        "import os; keep_only({'CAP_SYSLOG', 'CAP_KILL'}, 'nobody', inherited={'CAP_SYSLOG'});"
        "os.execv('/bin/cat', ['cat', '/proc/self/status'])"
    )
    bit = 1 << privileges.NUMBERS["CAP_SYSLOG"]
    kept = bit | 1 << privileges.NUMBERS["CAP_KILL"]
    assert sets(status) == {"CapInh": bit, "CapPrm": bit, "CapEff": bit, "CapBnd": kept, "CapAmb": bit}


@needs_root
def test_a_program_that_is_executed_gets_no_more() -> None:
    status = run(
        "import os; keep_only({'CAP_SYSLOG'}); no_new_privileges();"
        "os.execv('/bin/cat', ['cat', '/proc/self/status'])"
    )
    assert sets(status)["CapEff"] & ~(1 << privileges.NUMBERS["CAP_SYSLOG"]) == 0


@needs_root
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("drop_all('no-such-user')", 'privileges: no user "no-such-user" on this host'),
        (
            "keep_only({'CAP_SYSLOG'}); keep_only({'CAP_BPF'})",
            "privileges: cannot keep CAP_BPF: this process does not have it; rule:",
        ),
        (
            "keep_only(set()); drop_all('nobody')",
            "privileges: cannot become user nobody (uid 65534): Operation not permitted; rule:"
            " this needs CAP_SETUID and CAP_SETGID",
        ),
        ("keep_only({'CAP_PTRACE'})", 'no capability is called "CAP_PTRACE"; did you mean "CAP_SYS_PTRACE"?'),
    ],
)
def test_errors_say_what_and_why(script: str, says: str) -> None:
    with pytest.raises(AssertionError) as failed:
        run(script)
    assert says in str(failed.value)


def test_the_child_gets_its_signal_when_the_parent_ends() -> None:
    child = (
        "import signal, sys, time; from lockd.process.privileges import die_with_parent;"
        "signal.signal(15, lambda *_: (print('told', flush=True), exit()));"
        "die_with_parent(15); print('up', flush=True); print(file=sys.stderr, flush=True); time.sleep(20)"
    )
    read, write = os.pipe()
    parent = (
        "import os, subprocess, sys;"
        f"one = subprocess.Popen([sys.executable, '-c', {child!r}], stdout={write}, stderr=subprocess.PIPE);"
        "one.stderr.read(1); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", parent], cwd=ROOT, pass_fds=[write], check=True)
    os.close(write)
    with os.fdopen(read) as told:
        assert told.read() == "up\ntold\n"
