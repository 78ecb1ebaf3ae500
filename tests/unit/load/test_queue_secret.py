"""The number by which the programs keep the queues of two processes' locks apart."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from lockd.load import bpf_object
from lockd.load.bpf_object import BpfObject
from lockd.load.compiled import MapDefinition
from lockd.load.loader import set_queue_secret

CONTROL = {"names": ["queue_secret", "window"], "formats": ["u8", "u4"], "offsets": [0, 8], "itemsize": 16}


class Libbpf:
    """Stands for libbpf, and keeps what is written into maps."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def bpf_map_update_elem(self, fd: int, key: Any, value: Any, flags: int) -> int:
        self.written.append(ctypes.string_at(value._obj, CONTROL["itemsize"]))
        return 0


def test_each_load_writes_an_odd_number_that_nobody_can_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    libbpf = Libbpf()
    monkeypatch.setattr(bpf_object, "libbpf", lambda: libbpf)
    one = BpfObject.__new__(BpfObject)
    one._maps = {"control": MapDefinition("control", 2, 4, 16, 1, 0, "", 0, 0, "u4", CONTROL)}
    one._map_fds = {"control": 7}
    for _ in range(20):
        set_queue_secret(one)
    secrets = [int.from_bytes(element[:8], "little") for element in libbpf.written]
    assert all(secret % 2 for secret in secrets)
    assert len(set(secrets)) == 20
    assert max(secrets) > 1 << 60
    assert all(element[8:] == bytes(8) for element in libbpf.written)
