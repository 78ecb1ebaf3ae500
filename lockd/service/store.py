"""What systemd keeps for the next start: the descriptors by which the programs stay attached and count on.

A start takes them in place of loading if it would load the same. With them is kept, as a file in memory, the
manifest and what decides that; what is found is believed only if it is whole.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

try:
    from _blake2 import blake2b  # hashlib would load OpenSSL as well, which takes 3 MB
except ImportError:
    from hashlib import blake2b

from lockd.kernel.manifest import Manifest
from lockd.load.settings import LoadSettings
from lockd.service.systemd import Systemd

log = logging.getLogger(__name__)

LOCKD = Path(__file__).resolve().parents[1]
DECIDING = ("bpf/**/*.[ch]", "load/*.py", "kernel/btf.py", "kernel/calls.py", "kernel/manifest.py")
"""The files of lockd that decide what is loaded."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
MANIFEST, COUNTED = "manifest", "counted"
TRIES = 3
"""So many starts with what was kept may fail, one after another: the next one loads anew."""
DIGEST_BYTES = 32
IDENTITY = ("map_id:", "prog_id:", "prog_tag:", "link_id:", "link_type:")
"""The lines of proc(5)'s fdinfo that tell one of the kernel's BPF objects from others."""


def key_of(settings: LoadSettings) -> str:
    """What decides whether a start may take what another one loaded: the programs, how they are loaded, on
    which boot of which kernel."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    of_host = BOOT.read_text(), os.uname().release, settings.to_json()
    digest.update(repr(of_host).encode())
    for file in sorted(file for pattern in DECIDING for file in LOCKD.glob(pattern)):
        text = file.read_bytes()
        digest.update(f"{file.relative_to(LOCKD)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


class Store:
    """The kept descriptors: those that this start was given, and those that it leaves to the next one."""

    def __init__(self, systemd: Systemd, key: str) -> None:
        self._systemd, self._key = systemd, key
        self._given = systemd.kept()
        self._manifest: int | None = None
        """The file with the manifest. Its first byte is how many starts with it have failed in a row."""
        self._failed = 0
        """Of them, those before this start."""

    def adopt(self) -> tuple[Manifest, list[int]] | None:
        """The manifest and the descriptors of the last start, as the loader hands them over.

        None if there are none, or none that may be taken: those are let go, which detaches the programs.
        """
        if not self._given:
            return None
        try:
            manifest, fds = self._read(self._given)
        except (OSError, ValueError, LookupError, TypeError) as error:
            words = (isinstance(error, OSError) and error.strerror) or str(error)
            log.warning("what systemd kept of the last start is not used: %s; loading anew", words)
            self._let_go()
            return None
        log.info("the programs of the last start are attached still, and are gone on with")
        return manifest, fds

    def keep(self, manifest: Manifest, fds: list[int]) -> None:
        """Leave these, which were just loaded, to the next start."""
        if not self._systemd.is_there:
            return
        names = [f"bpf-{number:03}" for number in range(len(fds))]
        described = {
            "key": self._key,
            "manifest": json.loads(manifest.to_json()),
            "objects": {name: _identity(fd) for name, fd in zip(names, fds, strict=True)},
        }
        text = json.dumps(described).encode()
        self._manifest = os.memfd_create("lockd-manifest")
        os.pwrite(self._manifest, bytes(1) + blake2b(text, digest_size=DIGEST_BYTES).digest() + text, 0)
        for name, fd in zip(names, fds, strict=True):
            self._systemd.keep(name, fd)
        self._systemd.keep(MANIFEST, self._manifest)  # the last: without it nothing is adopted

    def counted(self) -> int | None:
        """The file in memory in which a sampler leaves what it has counted: of the last start, if adopted.

        None if nobody keeps it.
        """
        if not self._systemd.is_there:
            return None
        if COUNTED not in self._given:
            self._given[COUNTED] = os.memfd_create("lockd-counted")
            self._systemd.keep(COUNTED, self._given[COUNTED])
        return self._given[COUNTED]

    def forget_counted(self) -> None:
        """What the last start has counted is of no use; counted() gives a file of its own to this one."""
        if fd := self._given.pop(COUNTED, None):
            self._systemd.forget(COUNTED)
            os.close(fd)

    def has_started(self) -> None:
        """This start has come as far as to serve: it has not failed, unless has_failed() says so."""
        self._note_failed(self._failed)

    def has_lasted(self) -> None:
        """What this start has adopted is not what makes starts fail."""
        self._failed = 0
        self._note_failed(0)

    def has_failed(self) -> None:
        """This start ends by an error of its own."""
        self._note_failed(self._failed + 1)

    def _note_failed(self, failed: int) -> None:
        if self._manifest is not None:
            os.pwrite(self._manifest, bytes((failed,)), 0)

    def _read(self, given: Mapping[str, int]) -> tuple[Manifest, list[int]]:
        """Raises OSError, ValueError, LookupError or TypeError if something is not as keep() left it."""
        if MANIFEST not in given:
            raise ValueError("there is no manifest with it: that start did not come as far")
        file = given[MANIFEST]
        text = os.pread(file, os.fstat(file).st_size, 0)
        failed, digest, text = text[0], text[1 : 1 + DIGEST_BYTES], text[1 + DIGEST_BYTES :]
        if digest != blake2b(text, digest_size=DIGEST_BYTES).digest():
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
        if failed >= TRIES:
            raise ValueError(f"{failed} starts with it have failed, one after another")
        manifest = Manifest.from_json(json.dumps(described["manifest"]).encode())
        self._manifest, self._failed = file, failed
        self.has_failed()  # until it has started
        return manifest, [given[name] for name in objects]

    def _let_go(self) -> None:
        for name, fd in self._given.items():
            self._systemd.forget(name)
            os.close(fd)
        self._given = {}


def _identity(fd: int) -> str:
    """What a descriptor is of."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return " ".join([os.readlink(f"/proc/self/fd/{fd}"), *(x for x in lines if x.startswith(IDENTITY))])
