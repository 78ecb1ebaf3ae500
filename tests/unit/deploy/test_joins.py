"""Tests of the queries in docs/kubernetes.md, on what kube-state-metrics and cAdvisor tell about a node."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from lockd.export.catalog import CATALOG
from lockd.names.labels.cgroup_paths import unit_of
from tests.needs import need

PAGE = Path(__file__).resolve().parents[3] / "docs/kubernetes.md"
QUERIES = re.findall(r"```promql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
BY_CONTAINER, BY_POD, CPU_BY_CONTAINER, CPU_BY_NAME, BY_SLICE = QUERIES

UID, STATIC = "d3ca5f1e-0b5c-4a53-8f0e-9a7b1c2d3e4f", "8f14e45fceea167a5a36dedd4bea2543"
SHOP, SIDECAR, SANDBOX, ETCD, DOCKER = (digit * 64 for digit in "abcde")
POD_SLICE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice"
PATHS = {
    SHOP: f"{POD_SLICE}/cri-containerd-{SHOP}.scope",
    SIDECAR: f"{POD_SLICE}/cri-containerd-{SIDECAR}.scope",
    SANDBOX: f"{POD_SLICE}/cri-containerd-{SANDBOX}.scope",
    ETCD: f"/kubepods/burstable/pod{STATIC}/{ETCD}",
    DOCKER: f"/system.slice/docker-{DOCKER}.scope",
}
SERVICE = "/system.slice/nginx.service"
FAKE = f"/user.slice/user-1000.slice/user@1000.service{PATHS[SHOP]}"
"""A cgroup that a user may make in order to have waits counted as those of somebody else's container."""
MINUTES = 10


def series(metric: str, values: str, /, **labels: str) -> dict[str, str]:
    inner = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{metric}{{{inner}}}", "values": values}


def grows(each_second: float) -> str:
    """Return the values of a counter that grows by `each_second` in each second. A step is a minute."""
    return f"0+{each_second * 60:g}x{MINUTES}"


STAYS = f"1x{MINUTES}"


def of_lockd() -> list[dict[str, str]]:
    """Return series of lockd for units that are blocked for 1, 2, 4, ... ms in each second.

    Each unit has two processes, which share that time, and is on the run queue for as long.
    """
    found = []
    paths = [*PATHS.values(), SERVICE, FAKE]
    target = {"job": "lockd", "instance": "node-1:9776"}
    for number, path in enumerate(paths):
        unit = unit_of(path)
        said = dict(zip(CATALOG["lockd_unit_info"].labels, unit, strict=True))
        found.append(series("lockd_unit_info", STAYS, **target, **said))
        for comm in ("a", "b"):
            whose = {**target, "unit": unit.name, "comm": comm}
            sums = grows(2**number / 2000)
            found.append(series("lockd_futex_blocked_seconds_sum", sums, **whose, kind="lock"))
            found.append(series("lockd_futex_blocked_seconds_sum", grows(1), **whose, kind="cond"))
            found.append(series("lockd_offcpu_runqueue_seconds_sum", sums, **whose))
            longest = f"{2**number * 1000}x{MINUTES}"
            found.append(series("lockd_futex_max_blocked_us", longest, **whose, kind="lock", window="5m"))
    nobodys = {**target, "unit": "kernel", "comm": "kworker"}
    found.append(series("lockd_offcpu_runqueue_seconds_sum", grows(1), **nobodys))
    return found


def of_kube_state_metrics(instance: str) -> list[dict[str, str]]:
    found = []
    target = {"job": "kube-state-metrics", "instance": instance}
    for pod, uid, name, container in (
        ("shop-1", UID, "shop", f"containerd://{SHOP}"),
        ("shop-1", UID, "sidecar", f"containerd://{SIDECAR}"),
        ("shop-1", UID, "not-yet", ""),
        ("shop-2", "00000000-0000-4000-8000-000000000000", "not-yet", ""),
        ("etcd-node-1", "11111111-1111-4111-8111-111111111111", "etcd", f"containerd://{ETCD}"),
    ):
        whose = {**target, "namespace": "web", "pod": pod, "uid": uid}
        found.append(
            series(
                "kube_pod_container_info", STAYS, **whose, container=name, container_id=container, image="x"
            )
        )
        one = series("kube_pod_info", STAYS, **whose, node="node-1")
        if one not in found:
            found.append(one)
    return found


def of_cadvisor() -> list[dict[str, str]]:
    """Return series of containers that use a tenth of a processor each, and of the cgroups above them."""
    found = []
    target = {"job": "cadvisor", "instance": "node-1:10250"}
    names = {SHOP: ("shop-1", "shop"), SIDECAR: ("shop-1", "sidecar"), ETCD: ("etcd-node-1", "etcd")}
    for id_, (pod, container) in names.items():
        whose = {"namespace": "web", "pod": pod, "container": container, "name": id_, "id": PATHS[id_]}
        found.append(series("container_cpu_usage_seconds_total", grows(0.1), **target, **whose, cpu="total"))
    for path in ("/", "/kubepods.slice", POD_SLICE):
        found.append(series("container_cpu_usage_seconds_total", grows(1), **target, id=path, cpu="total"))
    whose = {"name": "registry", "id": PATHS[DOCKER], "cpu": "total"}
    found.append(series("container_cpu_usage_seconds_total", grows(0.1), **target, **whose))
    return found


def check(tmp_path: Path, query: str, input_series: list[dict[str, str]], expected: dict[str, float]) -> None:
    """Check that the query returns `expected` at the end of the series, and nothing else."""
    need("promtool")
    rounded = {"expr": f"round({query}, 0.000001)", "eval_time": f"{MINUTES}m"}
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    one = {"interval": "1m", "input_series": input_series}
    one["promql_expr_test"] = [{**rounded, "exp_samples": samples}]
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [one]}))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


EVERYTHING = [
    *of_lockd(),
    *of_kube_state_metrics("a:8080"),
    *of_kube_state_metrics("b:8080"),  # a second instance, which reports the same
    *of_cadvisor(),
]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (
            BY_CONTAINER,
            {
                '{container="shop", namespace="web", pod="shop-1"}': 0.001,
                '{container="sidecar", namespace="web", pod="shop-1"}': 0.002,
                '{container="etcd", namespace="web", pod="etcd-node-1"}': 0.008,
            },
        ),
        (BY_POD, {'{namespace="web", pod="shop-1"}': 4000}),
        (
            CPU_BY_CONTAINER,
            {
                '{container="shop", namespace="web", pod="shop-1"}': 0.01,
                '{container="sidecar", namespace="web", pod="shop-1"}': 0.02,
                '{container="etcd", namespace="web", pod="etcd-node-1"}': 0.08,
            },
        ),
        (
            CPU_BY_NAME,
            {
                f'{{name="{SHOP}"}}': 0.01,
                f'{{name="{SIDECAR}"}}': 0.02,
                f'{{name="{ETCD}"}}': 0.08,
                '{name="registry"}': 0.16,
            },
        ),
        (
            BY_SLICE,
            {
                f'{{instance="node-1:9776", slice="{POD_SLICE.rpartition("/")[2]}"}}': 0.007,
                '{instance="node-1:9776"}': 0.008,
                '{instance="node-1:9776", slice="system.slice"}': 0.048,
                '{instance="node-1:9776", slice="user-1000.slice"}': 0.064,
            },
        ),
    ],
    ids=["by container", "by pod", "cpu by container", "cpu by name", "by slice"],
)
def test_a_join(tmp_path: Path, query: str, expected: dict[str, float]) -> None:
    check(tmp_path, query, EVERYTHING, expected)


@pytest.mark.parametrize("query", [BY_CONTAINER, BY_POD, CPU_BY_CONTAINER, CPU_BY_NAME])
def test_without_the_other_exporter_a_join_is_empty_and_no_error(tmp_path: Path, query: str) -> None:
    check(tmp_path, query, of_lockd(), {})
