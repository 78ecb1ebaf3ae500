"""Tests of the blocks that bench/fleet writes: promtool must print exactly the samples that were put in."""

from __future__ import annotations

import random
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.fleet import blocks
from bench.fleet.blocks import Labels, Pattern
from tests.needs import need

BEGIN, HOUR = 1_800_000_000_000, 3_600_000


def labels(**pairs: str) -> Labels:
    return tuple(sorted({"__name__": "made", **pairs}.items()))


def values(seed: int, count: int) -> list[float]:
    """Values of four sorts: a random counter, the integers, a constant, and numbers that need all 64 bits."""
    chance = random.Random(seed)
    total, found = 0.0, []
    for number in range(count):
        total += chance.choice((0, 0, 1, chance.random(), 1e12))
        found.append((total, float(number), -1.5, chance.uniform(-1e300, 1e300))[seed % 4])
    return found


def dumped(directory: Path) -> dict[str, dict[int, float]]:
    promtool = need("promtool")
    (directory / "wal").mkdir()  # promtool requires the directory
    done = subprocess.run([promtool, "tsdb", "dump", directory], capture_output=True, text=True, check=True)
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in done.stdout.splitlines():
        name, value, time = re.fullmatch(r"(\{.*\}) (\S+) (\d+)", line).groups()  # type: ignore[union-attr]
        found[name][int(time)] = float(value)
    return found


@pytest.fixture
def patterns() -> Iterator[list[Pattern]]:
    yield [Pattern(15_000, values(seed, 960)) for seed in range(6)] + [Pattern(60_000, values(7, 240))]


def test_prometheus_reads_what_was_put_in(tmp_path: Path, patterns: list[Pattern]) -> None:
    series = {labels(host=f"h{number:03}", unit="ü"): patterns[number % 7] for number in range(50)}
    series[labels(__name__="alone")] = patterns[6]
    told = blocks.write(tmp_path, series, BEGIN, 2 * HOUR, 2)
    found = dumped(tmp_path)
    assert told["series"] == len(found) == 51
    assert told["samples"] == sum(map(len, found.values())) == sum(len(p.values) for p in series.values())
    for pairs, pattern in series.items():
        name = "{" + ", ".join(f'{key}="{value}"' for key, value in pairs) + "}"
        expected = {BEGIN + number * pattern.step: value for number, value in enumerate(pattern.values)}
        assert found[name] == pytest.approx(expected, rel=1e-15)


def test_series_are_found_by_their_labels(tmp_path: Path, patterns: list[Pattern]) -> None:
    series = {labels(host=f"h{number:03}", unit=f"u{number % 3}"): patterns[0] for number in range(30)}
    blocks.write(tmp_path, series, BEGIN, 2 * HOUR, 1)
    (tmp_path / "wal").mkdir()
    matched = [need("promtool"), "tsdb", "dump", "--match", '{unit="u1", host=~"h00.*"}', tmp_path]
    done = subprocess.run(matched, capture_output=True, text=True, check=True)
    assert set(re.findall(r'host="(\w+)"', done.stdout)) == {"h001", "h004", "h007"}


def test_the_checksum_is_castagnolis() -> None:
    assert blocks.crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
