"""Modules of numpy and Python that lockd leaves out are loaded as soon as somebody asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(code: str) -> str:
    code = f"import sys, lockd.sample, numpy\n{code}"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "4"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_numpy_starts_no_thread() -> None:
    """A thread of numpy would keep capabilities that its process gives up."""
    assert run("import os; print(len(os.listdir('/proc/self/task')))") == "1"


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print(numpy.ma.masked_array([1, 2], [0, 1]).sum())", "1"),
        ("from numpy import ma; print(ma.core.__name__)", "numpy.ma.core"),
        ("from numpy.random import default_rng; print(default_rng(1).integers(1))", "0"),
        ("import numpy.random; print(type(numpy.random.default_rng(1)).__name__)", "Generator"),
        ("import numpy.typing as npt; print(npt.NDArray.__name__)", "ndarray"),
        ("print(numpy.fft.fft([1, 1])[0].real, hasattr(numpy.ma, 'nothing'))", "2.0 False"),
    ],
)
def test_the_rest_is_there_if_it_is_wanted(code: str, result: str) -> None:
    assert run(code) == result


def test_the_rest_is_not_there_before() -> None:
    assert run("print([m for m in sys.modules if m.startswith(('numpy.ma.', 'numpy.random.'))])") == "[]"


CONFINED = "from lockd.process.confinement import confine, EXPORTER, NAMER\nconfine({rules})\n"
WITHOUT_DOCSTRING = """
import dataclasses
@dataclasses.dataclass
class Point:
    x: int
print(Point.__doc__)
"""
TRACEBACK = """
import json, traceback
try:
    json.loads("x")
except ValueError:
    print("raise JSONDecodeError(" in traceback.format_exc())  # from the source, which tokenize reads
"""


@pytest.mark.parametrize("rules", ["", "EXPORTER", "NAMER"])
@pytest.mark.parametrize(
    ("code", "result"),
    [
        (WITHOUT_DOCSTRING, "Point(x: int)"),
        (TRACEBACK, "True"),
        ("import logging.handlers; print(logging.handlers.SysLogHandler.__name__)", "SysLogHandler"),
        ("from pickle import dumps, loads; print(loads(dumps([1])))", "[1]"),
        ("import numpy, pickle; print(pickle.loads(pickle.dumps(numpy.arange(2))))", "[0 1]"),
        ("from multiprocessing import cpu_count; print(cpu_count() > 0)", "True"),
        ("import multiprocessing.pool; print(multiprocessing.pool.ThreadPool.__name__)", "ThreadPool"),
        ("import urllib.parse; print(urllib.parse.urlsplit('http://[::1]/').hostname)", "::1"),
        ("import locale, platform; print(platform.system(), locale.LC_ALL > 0)", "Linux True"),
    ],
)
def test_a_module_comes_late_also_behind_a_filter_of_system_calls(rules: str, code: str, result: str) -> None:
    assert run((CONFINED.format(rules=rules) if rules else "") + code) == result
