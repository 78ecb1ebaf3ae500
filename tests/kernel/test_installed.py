"""lockd as `make install` leaves it, started from another directory."""

from __future__ import annotations

import os
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.cost import children_of
from tests.needs import need, needs
from tests.support.lockd_process import ROOT, Lockd
from tests.traps import Traps

pytestmark = pytest.mark.untimed

USERS = {"lockd.export": "lockd", "lockd.names": "lockd-namer"}
"""The user of each process, by the module that it runs."""


def make(*words: str, before: tuple[str, ...] = ()) -> str:
    """Run make and return what it prints."""
    command = [*before, "make", "-s", *words]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout


@pytest.fixture(scope="module")
def own_etc(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The words that run a command with a copy of /etc, so that no users are made on this host."""
    need("systemd-sysusers")
    etc = tmp_path_factory.mktemp("own") / "etc"
    subprocess.run(["cp", "-a", "/etc", etc], check=True)
    for name in ("passwd", "group", "shadow", "gshadow"):
        lines = (etc / name).read_text().splitlines(keepends=True)
        (etc / name).write_text("".join(line for line in lines if not line.startswith("lockd")))
    return "unshare", "--mount", "sh", "-ec", 'mount --bind "$0" /etc; exec "$@"', str(etc)


@pytest.fixture(scope="module")
def installed(own_etc: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory into which lockd is installed: it has `usr` and `etc`."""
    place = tmp_path_factory.mktemp("installed")
    make("install", f"PREFIX={place}/usr", f"SYSCONFDIR={place}/etc", "DESTDIR=/", before=own_etc)
    return place


def test_no_process_of_it_imports_anything_from_where_it_is_started(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    traps = Traps(tmp_path / "here")
    environment = {**os.environ, **traps.environment}
    daemon = Lockd(tmp_path, program=[installed / "usr/bin/lockd"], cwd=traps.directory, env=environment)
    try:
        assert daemon.metrics().sum("lockd_hook_attached") > 0
        daemon.get("/api/v1/threads")
    finally:
        code = daemon.stop()
    assert traps.sprung == set()
    assert code == 0, "".join(daemon.log)


@pytest.fixture
def key(installed: Path, own_etc: tuple[str, ...]) -> Iterator[Path]:
    """The private key of a certificate for localhost, in a directory that all may enter.

    Only the user lockd may read the key.
    """
    need("openssl")
    with tempfile.TemporaryDirectory(prefix="lockd-web-", dir="/var/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        key = directory / "key.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
             "-keyout", directory / "made", "-out", directory / "cert.pem"],
            check=True, capture_output=True,
        )  # fmt: skip
        (directory / "cert.pem").chmod(0o644)
        subprocess.run(
            [*own_etc, "install", "-o", "lockd", "-m", "0400", directory / "made", key], check=True
        )
        yield key


def test_its_processes_are_users_of_their_own_of_which_one_has_the_key(
    installed: Path, own_etc: tuple[str, ...], key: Path, tmp_path: Path
) -> None:
    web = key.with_name("web.yml")
    web.write_text("tls_server_config: {cert_file: cert.pem, key_file: key.pem}\n")
    web.chmod(0o644)
    passwd = subprocess.check_output([*own_etc, "cat", "/etc/passwd"], text=True)
    uids = {line.split(":")[0]: line.split(":")[2] for line in passwd.splitlines()}
    daemon = Lockd(
        tmp_path, {"web": {"config_file": str(web)}}, program=[*own_etc, installed / "usr/bin/lockd"]
    )
    try:
        trusted = ssl.create_default_context(cafile=str(key.with_name("cert.pem")))
        with urllib.request.urlopen(f"https://{daemon.address}/metrics", context=trusted) as answer:
            assert b"\nlockd_hook_attached{" in answer.read()
        wanted = {process: {uids[user]} for process, user in USERS.items()}
        deadline = time.monotonic() + 30
        while (found := users_of(daemon.process.pid)) != wanted:  # the namer may take longer
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
    finally:
        assert daemon.stop() == 0, "".join(daemon.log)


def users_of(pid: int) -> dict[str, set[str]]:
    """Return the user ids (real, effective and so on) of the children of a process, by module.

    Only children that have called exec are included.
    """
    found = {}
    for child, command in children_of(pid).items():
        if module := command.partition("process/isolation.py ")[2]:
            about = Path(f"/proc/{child}/status").read_text().split("Uid:")[1]
            found[module.split()[0]] = set(about.split()[:4])
    return found


def root_with_users(directory: Path) -> Path:
    """The root directory of a system that has users but none of lockd's."""
    (directory / "etc").mkdir(parents=True)
    (directory / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (directory / "etc/group").write_text("root:x:0:\n")
    return directory


@needs("systemd-sysusers")
def test_users_are_made_who_cannot_log_in_and_stay(tmp_path: Path) -> None:
    root = root_with_users(tmp_path / "root")
    make("install", f"DESTDIR={root}")
    accounts = {line.split(":")[0]: line.split(":")[1:] for line in (root / "etc/passwd").open()}
    assert accounts.keys() == {"root", *USERS.values()}
    for user in USERS.values():
        password, uid, gid, _, home, shell = accounts[user]
        assert (password, home, shell.strip()) == ("x", "/nonexistent", "/usr/sbin/nologin")
        assert 0 < int(uid) < 1000 and 0 < int(gid) < 1000
    assert all(line.split(":")[1].startswith(("!", "*")) for line in (root / "etc/shadow").open())
    before = (root / "etc/passwd").read_text()
    make("install", f"DESTDIR={root}")
    told = make("uninstall", f"DESTDIR={root}")
    assert "the users lockd and lockd-namer stay" in told
    assert (root / "etc/passwd").read_text() == before
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert {path for path in left if not path.startswith("etc/")} == set()


@pytest.mark.parametrize(
    ("prefix", "place"), [("/usr", "usr/lib"), ("/usr/local", "usr/local/lib"), ("/opt/lockd", "etc")]
)
def test_a_package_has_the_file_that_makes_the_users_and_none_of_them(
    prefix: str, place: str, tmp_path: Path
) -> None:
    """The file is where systemd searches for such files, as the unit is."""
    make("install", f"DESTDIR={tmp_path}", f"PREFIX={prefix}")
    file = tmp_path / place / "sysusers.d/lockd.conf"
    assert file.read_text() == (ROOT / "deploy/sysusers.d/lockd.conf").read_text()
    assert (tmp_path / place / "systemd/system/lockd.service").exists()
    assert not (tmp_path / "etc/passwd").exists()


def test_an_upgrade_that_fails_leaves_the_old_version_and_another_replaces_it(tmp_path: Path) -> None:
    """A service that runs starts processes from there, and a start that finds a part ends for good."""
    root, lib = tmp_path / "root", tmp_path / "root/usr/lib/lockd"
    make("install", f"DESTDIR={root}")
    (lib / "lockd/of_the_old_version.py").touch()
    before = sorted(lib.rglob("*"))
    failing = tmp_path / "bin/tar"
    failing.parent.mkdir()
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError):
        make("install", f"DESTDIR={root}", before=("env", f"PATH={failing.parent}:{os.environ['PATH']}"))
    assert set(before) <= set(lib.rglob("*"))
    make("install", f"DESTDIR={root}")
    assert os.listdir(lib) == ["lockd"]
    assert set(before) - set(lib.rglob("*")) == {lib / "lockd/of_the_old_version.py"}


WHY = "because the old version now starts processes of the new one"
START = "installed; start it with: systemctl enable --now lockd"


@pytest.mark.parametrize(
    ("is_active", "root", "told"),
    [
        (True, "", f"installed; restart it at once, {WHY}: systemctl restart lockd"),
        (False, "", START),
        (True, "/", START),  # for another system, whatever runs on this one
    ],
)
def test_after_an_upgrade_it_says_that_the_service_is_to_be_restarted(
    is_active: bool, root: str, told: str, own_etc: tuple[str, ...], tmp_path: Path
) -> None:
    systemctl = tmp_path / "bin/systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f"#!/bin/sh\n[ $1 != is-active ] || exit {0 if is_active else 3}\n")
    systemctl.chmod(0o755)
    path = f"PATH={systemctl.parent}:{os.environ['PATH']}"
    words = (f"PREFIX={tmp_path}/usr", f"SYSCONFDIR={tmp_path}/etc", f"DESTDIR={root}")
    assert make("install", *words, before=(*own_etc, "env", path)).splitlines()[-1] == told


def test_without_sysusers_it_says_how_to_make_them(tmp_path: Path) -> None:
    root = root_with_users(tmp_path / "root")
    told = make("install", f"DESTDIR={root}", "SYSUSERS=no-such-program")
    assert "until there are users lockd and lockd-namer" in told
    assert "useradd --system" in told
