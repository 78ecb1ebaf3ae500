"""Imports go one way (docs/architecture.md): read from the syntax trees, so that no line escapes.

cli → service → {load, daemon → {sample, export}}, sample → names; only load imports bcc, and neither load nor
export imports numpy, which the exporter's memory would show.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SHARED = {
    "lockd", "advice", "batch", "config", "config_docs", "config_reader", "config_rules", "confinement",
    "cpu_clock", "errors", "flamegraph", "heap", "libbpf", "logs", "manifest", "numpy_parts", "pprof",
    "printable", "privileges", "profile", "rings", "snapshot",
}  # fmt: skip
"""Modules for all; they import each other and nothing else of lockd."""

MAY = {
    "__main__": {"cli"},
    "cli": {"analyze", "service", "top", "trace"},
    "service": {"children", "daemon", "load", "sample", "store", "systemd"},
    "daemon": {"children", "reload", "sample", "store", "supervisor", "systemd"},
    "reload": {"children"},
    "supervisor": {"children"},
    "children": {"load", "isolated"},
    "store": {"load", "systemd"},
    "isolated": {"?"},  # whatever it is told to start
    "numpy_parts": {"?"},  # parts of numpy
    "systemd": set(),
    "top": {"top_rates"},
    "top_rates": set(),
    "trace": {"children", "load", "names", "sample"},
    "analyze": {"names", "trace"},
    "load": set(),
    "sample": {"names"},
    "names": {"isolated"},
    "export": set(),
}
"""What each part may import besides itself and SHARED. The exporter is a process that children starts."""

ONLY = {
    "bcc": {"load"},
    "matplotlib": {"analyze"},
    "numpy": {"analyze", "sample", "names", "trace"},
    "seccomp": {"confinement"},
}
"""The parts that may import a library; for all others there is no rule."""


def violations(root: Path) -> list[str]:
    """Every import under root/lockd that the rules forbid, as FILE:LINE: IMPORTER imports IMPORTED."""
    found = []
    for path in sorted((root / "lockd").rglob("*.py")):
        importer = _part(path.relative_to(root).with_suffix("").parts)
        if importer not in MAY and importer not in SHARED:
            found.append(f"{path.relative_to(root)}: {importer} is not in the rules")
        for line, module in _imports(root, path):
            if not _is_allowed(importer, module):
                found.append(f"{path.relative_to(root)}:{line}: {importer} imports {module}")
    return found


def _is_allowed(importer: str, module: str) -> bool:
    names = tuple(module.split("."))
    if names[0] == "lockd":
        imported = _part(names)
        return imported in SHARED or imported == importer or imported in MAY.get(importer, ())
    return importer in ONLY.get(names[0], {importer})


def _part(names: tuple[str, ...]) -> str:
    """`sample` for lockd.sample.maps, `lockd` for the package itself."""
    return names[1] if len(names) > 1 and names[1] != "__init__" else names[0]


def _imports(root: Path, path: Path) -> Iterator[tuple[int, str]]:
    """The line and the full name of every module that a file imports, inside functions as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(root).parts[: -node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                inside = f"{base}.{alias.name}"
                is_module = base.split(".")[0] == "lockd" and _is_module(root / inside.replace(".", "/"))
                yield node.lineno, inside if is_module else base
        elif isinstance(node, ast.Call) and _is_import_by_name(node.func):
            name = node.args[0] if node.args else None
            yield node.lineno, str(name.value) if isinstance(name, ast.Constant) else "lockd.?"


def _is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").exists()


def _is_import_by_name(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("__import__", "import_module", "run_module")


def test_imports_go_one_way() -> None:
    assert violations(ROOT) == []


def test_the_rules_name_nothing_that_is_not_there() -> None:
    parts = {_part(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / "lockd").rglob("*.py")}
    assert SHARED | MAY.keys() == parts


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("sample/new.py", "import bcc", "sample imports bcc"),
        ("service.py", "def f():\n    from bcc import BPF", "service imports bcc"),
        ("config.py", "import bcc.table as t", "config imports bcc.table"),
        ("export/new.py", "import numpy as np", "export imports numpy"),
        ("export/new.py", "from numpy import typing", "export imports numpy"),
        ("export/new.py", "from lockd.load.settings import X", "export imports lockd.load.settings"),
        ("export/new.py", "from lockd import sample", "export imports lockd.sample"),
        ("export/new.py", "from ..sample.maps import X", "export imports lockd.sample.maps"),
        ("export/new.py", "from .. import names", "export imports lockd.names"),
        (
            "export/new.py",
            "import importlib\nimportlib.import_module('lockd.load')",
            "export imports lockd.load",
        ),
        ("export/new.py", "__import__('lockd.' + 'load')", "export imports lockd.?"),
        ("load/new.py", "import lockd.sample.maps", "load imports lockd.sample.maps"),
        ("load/new.py", "from lockd.names import units", "load imports lockd.names.units"),
        ("load/new.py", "import numpy", "load imports numpy"),
        ("sample/new.py", "import matplotlib.figure", "sample imports matplotlib.figure"),
        ("names/new.py", "from lockd.sample.maps import X", "names imports lockd.sample.maps"),
        ("names/new.py", "if TYPE_CHECKING:\n    import lockd.export", "names imports lockd.export"),
        ("sample/new.py", "from lockd.export.catalog import X", "sample imports lockd.export.catalog"),
        ("sample/new.py", "from lockd import load", "sample imports lockd.load"),
        ("sample/new.py", "from lockd.service import run", "sample imports lockd.service"),
        ("top.py", "from lockd.children import X", "top imports lockd.children"),
        ("errors.py", "from lockd.sample.maps import X", "errors imports lockd.sample.maps"),
        ("novelty.py", "", "novelty is not in the rules"),
        ("novelty/new.py", "", "novelty is not in the rules"),
    ],
)
def test_a_violation_is_seen(tmp_path: Path, file: str, text: str, says: str) -> None:
    for part in ("load", "sample", "names", "export"):
        (tmp_path / "lockd" / part).mkdir(parents=True)
    for module in ("sample/maps.py", "names/units.py", "errors.py"):
        (tmp_path / "lockd" / module).write_text("")
    path = tmp_path / "lockd" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (violation,) = violations(tmp_path)
    assert violation.startswith(f"lockd/{file}")
    assert violation.endswith(says)


UNUSED_OF_NUMPY = {"numpy.fft._pocketfft", "numpy.ma.core", "numpy.random.mtrand", "numpy._typing"}
"""What they would load, if they were (lockd/numpy_parts.py)."""


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("lockd.export.__main__", {"yaml", "numpy", "bcc", "lockd.load", "lockd.sample", "lockd.names"}),
        ("lockd.load.__main__", {"bcc", "numpy", "lockd.sample", "lockd.names", "lockd.export"}),
        (
            "lockd.names.__main__",
            {"bcc", "prometheus_client", "tornado", "ssl", "lockd.load", "lockd.sample", *UNUSED_OF_NUMPY},
        ),
        (
            "lockd.service",
            {"bcc", "numpy", "prometheus_client", "tornado", "ssl", "lockd.sample", "lockd.export"},
        ),
        (
            "lockd.daemon",
            {"bcc", "prometheus_client", "tornado", "ssl", "asyncio", "lockd.export", *UNUSED_OF_NUMPY},
        ),
        ("lockd.cli", {"bcc", "numpy", "prometheus_client", "tornado", "rich"}),
    ],
)
def test_nothing_comes_in_by_the_way(module: str, forbidden: set[str]) -> None:
    """What a process has loaded in the end, through other libraries as well."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert forbidden & set(done.stdout.split()) == set()
