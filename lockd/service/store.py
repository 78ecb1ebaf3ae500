"""The descriptors that systemd stores over a restart, by which the programs stay attached and go on counting.

A start adopts them instead of loading the programs, if it would load the same. Stored with them are a file in
memory with the manifest and the conditions of adoption, and a file with the sampler's counts. The descriptors
are used only if all of them are there and unchanged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from lockd.errors import PASSING
from lockd.kernel.manifest import Manifest
from lockd.load.settings import LoadSettings
from lockd.messages import DIGEST_BYTES, digest
from lockd.process import memory, privileges
from lockd.service.systemd import Systemd

log = logging.getLogger(__name__)

LOCKD = Path(__file__).resolve().parents[1]
DECIDING = ("bpf/**/*.[ch]", "load/*.py", "kernel/btf.py", "kernel/calls.py", "kernel/manifest.py")
"""The files of lockd that decide what is loaded."""
PROCFS = Path("/proc")
BOOT = "sys/kernel/random/boot_id"
DECIDING_SETTINGS = (
    "kernel/kptr_restrict",
    "kernel/perf_event_paranoid",
    "kernel/ftrace_enabled",
    "net/core/bpf_jit_enable",
)
"""Settings of the kernel that decide which hooks can be attached (sysctl)."""
MANIFEST, COUNTED = "manifest", "counted"
"""The names under which systemd stores the two files."""
TRIES = 3
"""Starts in a row that may fail with adopted descriptors. The start after them loads the programs anew."""
IDENTITY = ("map_id:", "prog_id:", "prog_tag:", "link_id:", "link_type:")
"""Beginnings of the lines of /proc/PID/fdinfo/FD (proc(5)) that identify a BPF object of the kernel."""


def key_of(settings: LoadSettings, procfs: Path = PROCFS) -> str:
    """The condition of adoption: a digest of all that decides what is loaded.

    It is made of lockd's programs and loader, the settings, the release and boot id of the kernel, its
    DECIDING_SETTINGS, and the capabilities of this process.
    """
    of_kernel = [(procfs / BOOT).read_text(), os.uname().release]
    for name in DECIDING_SETTINGS:
        with contextlib.suppress(OSError):  # the kernel lacks the setting, or only root may read it
            of_kernel.append(f"{name} {(procfs / 'sys' / name).read_text()}")
    of_host = of_kernel, sorted(privileges.capabilities()), settings.to_json()
    parts = [repr(of_host).encode()]
    for file in sorted(file for pattern in DECIDING for file in LOCKD.glob(pattern)):
        text = file.read_bytes()
        parts.append(f"{file.relative_to(LOCKD)} {len(text)}\n".encode() + text)
    return digest(b"".join(parts)).hex()


class Store:
    """The descriptors that this start was given, and those that it leaves to the next start.

    `key` is the result of key_of() for this start.
    """

    def __init__(self, systemd: Systemd, key: str) -> None:
        self._systemd, self._key = systemd, key
        self._given = systemd.take_descriptors()
        self._manifest: int | None = None
        """The file with the manifest. Its first byte is the number of starts in a row that failed with it."""
        self._failures = 0
        """The number of starts in a row before this one that failed with the manifest."""

    def adopt(self) -> tuple[Manifest, list[int]] | None:
        """The manifest and the descriptors of the last start, in the order in which the loader hands them
        over.

        None if there are none, or if they cannot be used. In that case they are closed, which detaches the
        programs. Raises OSError if the host lacks a resource, such as memory, to read them; they stay then.
        """
        if not self._given:
            return None
        try:
            manifest, fds = self._read(self._given)
        except (OSError, ValueError, LookupError, TypeError) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                raise
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            log.warning("what systemd kept of the last start is not used: %s; loading anew", reason)
            self._close_given()
            return None
        log.info("the programs of the last start are attached still; this start goes on with them")
        return manifest, fds

    def keep(self, manifest: Manifest, fds: list[int]) -> None:
        """Store the manifest and the descriptors that the loader has just handed over."""
        if not self._systemd.is_available:
            return
        names = [f"bpf-{number:03}" for number in range(len(fds))]
        described = {
            "key": self._key,
            "manifest": json.loads(manifest.to_json()),
            "objects": {name: _identity(fd) for name, fd in zip(names, fds, strict=True)},
        }
        text = json.dumps(described).encode()
        self._manifest = memory.create_file("lockd-manifest")
        os.pwrite(self._manifest, bytes(1) + digest(text) + text, 0)
        for name, fd in zip(names, fds, strict=True):
            self._systemd.store_descriptor(name, fd)
        # The manifest comes last, because adopt() uses none of the others without it.
        self._systemd.store_descriptor(MANIFEST, self._manifest)

    def counts_file(self) -> int | None:
        """The file in memory for the sampler's saved state (lockd/sample/saved_state.py).

        If adopt() has succeeded, it is the file that the last start left; otherwise, or if that is missing,
        an empty one. None without systemd.
        """
        if not self._systemd.is_available:
            return None
        if COUNTED not in self._given:
            self._given[COUNTED] = memory.create_file("lockd-counted")
            self._systemd.store_descriptor(COUNTED, self._given[COUNTED])
        return self._given[COUNTED]

    def discard_counts(self) -> None:
        """Discard the counts of the last start. counts_file() then returns an empty file."""
        if fd := self._given.pop(COUNTED, None):
            self._systemd.remove_descriptor(COUNTED)
            os.close(fd)

    def note_started(self) -> None:
        """Note that this start serves metrics: it has not failed, unless note_failed() follows."""
        self._write_failures(self._failures)

    def note_lasted(self) -> None:
        """Note that this start has run for LASTED_SECONDS (daemon.py), so what it has adopted is good.

        The starts that failed before it count no longer.
        """
        self._failures = 0
        self._write_failures(0)

    def note_failed(self) -> None:
        """Note that this start ends by an error of its own."""
        self._write_failures(self._failures + 1)

    def _write_failures(self, failures: int) -> None:
        if self._manifest is not None:
            os.pwrite(self._manifest, bytes((failures,)), 0)

    def _read(self, given: Mapping[str, int]) -> tuple[Manifest, list[int]]:
        """Return the manifest and the descriptors among the `given` ones, which are by name.

        Raises OSError, ValueError, LookupError or TypeError if something is not as keep() left it.
        """
        if MANIFEST not in given:
            raise ValueError("there is no manifest with it: that start did not come as far")
        file = given[MANIFEST]
        content = os.pread(file, os.fstat(file).st_size, 0)
        failures, text = content[0], content[1 + DIGEST_BYTES :]
        if content[1 : 1 + DIGEST_BYTES] != digest(text):
            raise ValueError("the manifest is damaged")
        described = json.loads(text)
        if described["key"] != self._key:
            raise ValueError("this start loads other programs, or the same with other settings")
        objects: dict[str, str] = described["objects"]
        for name, identity in objects.items():
            if name not in given:
                raise ValueError(f"the descriptor {name} is missing")
            if _identity(given[name]) != identity:
                raise ValueError(f"the descriptor {name} is another's")
        if failures >= TRIES:
            raise ValueError(f"{failures} starts with it have failed, one after another")
        manifest = Manifest.from_json(json.dumps(described["manifest"]).encode())
        self._manifest, self._failures = file, failures
        self.note_failed()  # this start counts as failed until note_started() is called
        return manifest, [given[name] for name in objects]

    def _close_given(self) -> None:
        for name, fd in self._given.items():
            self._systemd.remove_descriptor(name)
            os.close(fd)
        self._given = {}


def _identity(fd: int) -> str:
    """The kernel object that a descriptor stands for, as /proc describes it."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return " ".join(
        [os.readlink(f"/proc/self/fd/{fd}"), *(line for line in lines if line.startswith(IDENTITY))]
    )
