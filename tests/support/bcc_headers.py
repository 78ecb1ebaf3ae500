"""Kernel headers for bcc's own tools on a host without any: lockd's few, and what else the tools need."""

from __future__ import annotations

import shutil
from pathlib import Path

from lockd.kernel.btf import KernelTypes
from lockd.load.source import HEADERS

MEMBERS = ("flags", "__state", "state", "pid", "tgid")
"""The members of struct task_struct that bcc's tools read."""


def bcc_headers(directory: Path) -> dict[str, str]:
    """Write the headers into `directory`, and return the environment variable that leads bcc to them."""
    place = directory / "headers"
    shutil.copytree(HEADERS, place)
    (place / "include/linux/sched.h").write_text(_sched_h())
    return {"BCC_KERNEL_SOURCE": str(place)}


def _sched_h() -> str:
    """Return as much of the running kernel's <linux/sched.h> as the tools need."""
    types, lines, end = KernelTypes(), [], 0
    there = [name for name in MEMBERS if types.has_member("task_struct", name)]
    for name in sorted(there, key=lambda name: types.offset("task_struct", name)):
        offset, size = types.offset("task_struct", name), 8 if name == "state" else 4
        lines.append(f"char before_{name}[{offset - end}]; {'long' if size == 8 else 'int'} {name};")
        end = offset + size
    constants = "#define TASK_COMM_LEN 16\n#define PF_KTHREAD 0x00200000\n"
    return f"{constants}struct task_struct {{ {''.join(lines)} }};\n"
