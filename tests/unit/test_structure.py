"""Imports go one way (docs/architecture.md). They are read from the syntax trees, so that none escapes.

A room is a folder of lockd/, or a module that lies in it directly. The rules below say which rooms each room
may import. Only load imports bcc. Neither load nor export imports numpy, which costs 25 MB of memory.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

COMMON = {"lockd", "advice", "errors", "logs", "printable", "messages"}
"""Modules that every room may import. They import each other, and of the rooms only `process`."""

MAY = {
    "__main__": {"cli"},
    "cli": {"analyze", "config", "service", "trace", "views"},
    "analyze": {"columns", "names", "trace"},
    "service": {"config", "kernel", "load", "process", "sample"},
    "trace": {"columns", "kernel", "load", "names", "views"},
    "sample": {"columns", "kernel", "names", "process"},
    "export": {"config", "process", "views"},
    "names": {"kernel", "process"},
    "load": {"kernel", "process"},
    "kernel": {"columns", "process"},
    "columns": set(),
    "views": set(),
    "config": set(),
    "process": {"?"},  # names known only at run time: unused parts of numpy, and the module a process runs
}
"""The rooms that each room may import besides itself and COMMON, from the top of the house to its foundation.

The exporter, the namer and the loader are processes; `service`, `sample` and `load` start them by name.
"""

ONLY = {
    "bcc": {"load"},
    "matplotlib": {"analyze"},
    "numpy": {"analyze", "columns", "kernel", "sample", "names", "trace"},
    "seccomp": {"process"},
}
"""The rooms that may import a library; for all other libraries there is no rule."""


def violations(root: Path) -> list[str]:
    """Every import under root/lockd that the rules forbid, as FILE:LINE: IMPORTER imports IMPORTED."""
    found = []
    for path in sorted((root / "lockd").rglob("*.py")):
        importer = _room(path.relative_to(root).with_suffix("").parts)
        if importer not in MAY and importer not in COMMON:
            found.append(f"{path.relative_to(root)}: {importer} is not in the rules")
        for line, module in _imports(root, path):
            if not _is_allowed(importer, module):
                found.append(f"{path.relative_to(root)}:{line}: {importer} imports {module}")
    return found


def _is_allowed(importer: str, module: str) -> bool:
    names = tuple(module.split("."))
    if names[0] == "lockd":
        imported = _room(names)
        return imported in COMMON or imported == importer or imported in MAY.get(importer, {"process"})
    return importer in ONLY.get(names[0], {importer})


def _room(names: tuple[str, ...]) -> str:
    """Return the room of a module: `kernel` for lockd.kernel.maps, `lockd` for the package itself."""
    return names[1] if len(names) > 1 and names[1] != "__init__" else names[0]


def _imports(root: Path, path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of every module that a file imports, inside functions as well."""
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
    rooms = {_room(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / "lockd").rglob("*.py")}
    assert COMMON | MAY.keys() == rooms


def test_the_rules_have_no_circle() -> None:
    TopologicalSorter({room: others - {"?"} for room, others in MAY.items()}).prepare()


def test_no_modules_import_each_other() -> None:
    imports = {}
    for path in sorted((ROOT / "lockd").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        imported = {module for _, module in _imports(ROOT, path) if module.startswith("lockd.")}
        imports[name] = imported - {name}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_the_folders_of_names_have_no_circle() -> None:
    """Modules that lie in lockd/names directly count as folders."""
    imports: dict[str, set[str]] = {}
    for path in sorted((ROOT / "lockd/names").rglob("*.py")):
        parts = path.relative_to(ROOT / "lockd/names").with_suffix("").parts
        imported = (module.split(".") for _, module in _imports(ROOT, path))
        folders = {names[2] for names in imported if names[:2] == ["lockd", "names"] and len(names) > 2}
        imports.setdefault(parts[0], set()).update(folders - {parts[0]})
    TopologicalSorter(imports).prepare()


def test_private_names_stay_in_their_module() -> None:
    found = []
    for path in sorted((ROOT / "lockd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockd"):
                found += [f"{path.relative_to(ROOT)}: {a.name}" for a in node.names if a.name.startswith("_")]
    assert found == ["lockd/cli.py: __version__"]


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("sample/new.py", "import bcc", "sample imports bcc"),
        ("service/new.py", "def f():\n    from bcc import BPF", "service imports bcc"),
        ("config/new.py", "import bcc.table as t", "config imports bcc.table"),
        ("export/new.py", "import numpy as np", "export imports numpy"),
        ("export/new.py", "from numpy import typing", "export imports numpy"),
        ("export/new.py", "from lockd.load.settings import X", "export imports lockd.load.settings"),
        ("export/new.py", "from lockd import sample", "export imports lockd.sample"),
        ("export/new.py", "from ..kernel.maps import X", "export imports lockd.kernel.maps"),
        ("export/new.py", "from .. import names", "export imports lockd.names"),
        (
            "export/new.py",
            "import importlib\nimportlib.import_module('lockd.load')",
            "export imports lockd.load",
        ),
        ("export/new.py", "__import__('lockd.' + 'load')", "export imports lockd.?"),
        ("load/new.py", "import lockd.sample.loop", "load imports lockd.sample.loop"),
        ("load/new.py", "from lockd.names.labels import units", "load imports lockd.names.labels.units"),
        ("load/new.py", "import numpy", "load imports numpy"),
        ("kernel/new.py", "from lockd.load import hooks", "kernel imports lockd.load"),
        ("sample/new.py", "import matplotlib.figure", "sample imports matplotlib.figure"),
        ("names/new.py", "from lockd.sample.loop import X", "names imports lockd.sample.loop"),
        ("names/new.py", "if TYPE_CHECKING:\n    import lockd.export", "names imports lockd.export"),
        ("sample/new.py", "from lockd.export.catalog import X", "sample imports lockd.export.catalog"),
        ("sample/new.py", "from lockd import load", "sample imports lockd.load"),
        ("sample/new.py", "from lockd.service import run", "sample imports lockd.service"),
        ("trace/new.py", "from lockd.sample.loop import X", "trace imports lockd.sample.loop"),
        ("views/new.py", "from lockd.service.exporter import X", "views imports lockd.service.exporter"),
        ("errors.py", "from lockd.kernel.maps import X", "errors imports lockd.kernel.maps"),
        ("novelty.py", "", "novelty is not in the rules"),
        ("novelty/new.py", "", "novelty is not in the rules"),
    ],
)
def test_a_violation_is_seen(tmp_path: Path, file: str, text: str, says: str) -> None:
    for room in ("kernel", "load", "sample", "names/labels", "export"):
        (tmp_path / "lockd" / room).mkdir(parents=True)
    for module in ("kernel/maps.py", "names/labels/units.py", "errors.py"):
        (tmp_path / "lockd" / module).write_text("")
    path = tmp_path / "lockd" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (violation,) = violations(tmp_path)
    assert violation.startswith(f"lockd/{file}")
    assert violation.endswith(says)


UNUSED_OF_PYTHON = {"curses", "ipaddress", "multiprocessing", "pickle"}
"""Modules of Python's library that others import without need (`SELDOM` in lockd/process/memory.py)."""
if sys.version_info < (3, 12):
    UNUSED_OF_PYTHON |= {"inspect"}  # later versions use it for every dataclass
UNUSED_OF_NUMPY = {"numpy.fft._pocketfft", "numpy.ma.core", "numpy.random.mtrand", "numpy._typing"}
"""Modules that are loaded only with the unused parts of numpy (`UNUSED` in lockd/process/memory.py)."""


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        (
            "lockd.export.__main__",
            {"yaml", "numpy", "bcc", "lockd.load", "lockd.sample", "lockd.names"}
            | (UNUSED_OF_PYTHON - {"inspect", "ipaddress"}),  # tornado and sources.py use these
        ),
        ("lockd.load.__main__", {"bcc", "numpy", "lockd.sample", "lockd.names", "lockd.export"}),
        (
            "lockd.names.__main__",
            {"bcc", "prometheus_client", "tornado", "ssl", "lockd.load", "lockd.sample"}
            | UNUSED_OF_NUMPY
            | UNUSED_OF_PYTHON,
        ),
        (
            "lockd.service.start",
            {"bcc", "numpy", "prometheus_client", "tornado", "ssl", "lockd.sample", "lockd.export"},
        ),
        (
            "lockd.service.daemon",
            {"bcc", "prometheus_client", "tornado", "ssl", "asyncio", "lockd.export"}
            | UNUSED_OF_NUMPY
            | UNUSED_OF_PYTHON,
        ),
        ("lockd.cli", {"bcc", "numpy", "prometheus_client", "tornado", "rich"}),
    ],
)
def test_nothing_comes_in_by_the_way(module: str, forbidden: set[str]) -> None:
    """No process loads a module that it must not have, neither directly nor through other libraries."""
    code = (
        f"import sys, {module}; from lockd.process.memory import LazyModule;"
        "print(*(name for name, one in sys.modules.items() if not isinstance(one, LazyModule)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert forbidden & set(done.stdout.split()) == set()
