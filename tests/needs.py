"""The programs that tests ask for, and the packages that have them, which `make test` installs.

tests/unit/test_needs.py fails if a test asks for another program. It compares these lists with the Makefile.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

PACKAGES = {
    "bpftool": "bpftool",
    "bpftrace": "bpftrace",
    "c++filt": "binutils",
    "cargo": "cargo",
    "chromium": "chromium",
    "g++": "g++",
    "gcc": "gcc",
    "go": "golang-go",
    "javac": "openjdk-17-jdk-headless",
    "java": "openjdk-17-jdk-headless",
    "jcmd": "openjdk-17-jdk-headless",
    "kill": "procps",
    "klockstat-bpfcc": "bpfcc-tools",
    "make": "make",
    "mariadb": "mariadb-client",
    "mariadb-install-db": "mariadb-server-core",
    "mariadb-slap": "mariadb-client",
    "mariadbd": "mariadb-server-core",
    "mke2fs": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "musl-gcc": "musl-tools",
    "nm": "binutils",
    "objcopy": "binutils",
    "objdump": "binutils",
    "offcputime-bpfcc": "bpfcc-tools",
    "offwaketime-bpfcc": "bpfcc-tools",
    "openssl": "openssl",
    "qemu-system-x86_64": "qemu-system-x86",
    "redis-benchmark": "redis-tools",
    "redis-check-rdb": "redis-tools",  # a server, by any other name; the package redis-server starts one
    "rustc": "rustc",
    "stackcount-bpfcc": "bpfcc-tools",
    "strip": "binutils",
    "sysbench": "sysbench",
    "systemctl": "systemd",
    "systemd-analyze": "systemd",
    "systemd-sysusers": "systemd",
    "zstd": "zstd",
    "python3:matplotlib": "python3-matplotlib",
}
"""The package of each program or Python module. Where the Makefile has a choice, `a|b`, it is the first."""
PLACES = {
    "cargo": ("/usr/bin/cargo",),  # Debian's, whatever PATH has first: only Debian's has crates
    "rustc": ("/usr/bin/rustc",),
    "mariadbd": ("/usr/sbin/mariadbd",),
    "chromium": ("chromium", "chromium-browser"),  # Ubuntu's is chromium-browser
}
"""The places of the programs that may not be on PATH under the names above."""
SERVERS = Path(os.environ.get("LOCKD_CACHE", "/var/cache/lockd-tests")) / "servers"
"""Where the Makefile unpacks packages that must not be installed, as that would start their servers."""
UNPACKED = {
    name: f"usr/lib/postgresql/*/bin/{name}" for name in ("initdb", "pgbench", "postgres", "psql")
} | {
    "amtool": "usr/bin/amtool",
    "memcached": "usr/bin/memcached",
    "nginx": "usr/sbin/nginx",
    "prometheus": "usr/bin/prometheus",
    "prometheus-alertmanager": "usr/bin/prometheus-alertmanager",
}
"""The paths of programs below SERVERS, or below / on a host that has their packages installed."""
MADE = dict.fromkeys(("promtool", *UNPACKED), "tests/unpack")
"""Programs that the Makefile does not install as packages, and the script with which it gets them."""


def libraries() -> dict[str, str]:
    """Return the environment for unpacked programs, with the directories of their libraries."""
    paths = [str(path) for path in SERVERS.glob("usr/lib/*-linux-gnu*")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(paths)} if paths else dict(os.environ)


def found(program: str) -> str:
    """Return the path of a program, or the name of a module; empty if it is not installed.

    Raises KeyError if no package is known to have it.
    """
    assert program in MADE or PACKAGES[program]
    if program.startswith("python3:"):
        spec = importlib.util.find_spec(program.removeprefix("python3:"))
        return spec.name if spec else ""
    if program in UNPACKED:
        return next((str(path) for root in (SERVERS, Path("/")) for path in root.glob(UNPACKED[program])), "")
    return next(filter(None, map(shutil.which, PLACES.get(program, (program,)))), "")


def absence(*programs: str) -> str:
    """Return why a test that needs these programs cannot run; empty if it can."""
    absent = [program for program in programs if not found(program)]
    where = ", ".join(sorted({MADE.get(program) or PACKAGES[program] for program in absent}))
    return f"not installed: {', '.join(absent)} (of {where}); `make test` installs it" if absent else ""


def need(*programs: str) -> str:
    """Skip the test if one of these programs is not installed. Return the path of the first one."""
    if reason := absence(*programs):
        pytest.skip(reason)
    return found(programs[0])


def needs(*programs: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test, or a module, if one of these programs is not installed."""
    reason = absence(*programs)
    return pytest.mark.skipif(bool(reason), reason=reason or "nothing is missing")
