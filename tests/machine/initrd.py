"""The first file system of a machine: init.c and the modules that lead to the disk, as an initramfs."""

from __future__ import annotations

import lzma
import re
import subprocess
import tempfile
from pathlib import Path

MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "virtio_rng", "crc32c_generic", "ext4")
"""The modules that a machine loads, together with those that they depend on. What a kernel does not have as a
module is built in, or else the kernel does not boot and says so."""
SUFFIXES = (".ko", ".ko.xz", ".ko.zst")


def build(modules: Path, initrd: Path) -> None:
    """Write `initrd` for the kernel whose modules are in that directory."""
    with tempfile.TemporaryDirectory(prefix="lockd-init-") as name:
        init = Path(name) / "init"
        source = Path(__file__).with_name("init.c")
        subprocess.run(
            ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-o", init, source], check=True
        )
        archive = _entry("dev", 0o040755) + _entry("dev/console", 0o020600, device=(5, 1))
        archive += _entry("init", 0o100755, init.read_bytes()) + _entry("modules", 0o040755)
        archive += _entry("agent.py", 0o100644, source.with_name("agent.py").read_bytes())
    for turn, (name, content) in enumerate(_in_order(modules).items()):
        archive += _entry(f"modules/{turn:02}-{name}.ko", 0o100644, content)
    initrd.write_bytes(archive + _entry("TRAILER!!!", 0))


def _in_order(directory: Path) -> dict[str, bytes]:
    """Return the contents of the modules by name, each after those it depends on."""
    files = {
        path.name.partition(".")[0].replace("-", "_"): path
        for path in (directory / "kernel").rglob("*.ko*")
        if path.name.endswith(SUFFIXES)
    }
    ordered: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in ordered or name not in files:
            return
        content = _read(files[name])
        # modprobe would look this up in depmod's tables, which packages do not have.
        for depended in re.findall(rb"\0depends=([^\0]+)", content):
            for one in depended.decode().split(","):
                add(one.replace("-", "_"))
        ordered[name] = content

    for name in MODULES:
        add(name)
    return ordered


def _read(path: Path) -> bytes:
    match path.suffix:
        case ".xz":
            return lzma.decompress(path.read_bytes())
        case ".zst":
            return subprocess.check_output(["zstd", "-dcq", path])
    return path.read_bytes()


def _entry(name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    """Return one file in the format newc of cpio."""
    path = name.encode() + b"\0"
    numbers = (0, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08x" % number for number in numbers) + path
    return head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)
