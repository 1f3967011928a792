"""The machine at hand as a cluster."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.cost.economy import price_per_device_h
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import find_device
from argosy.plan.hardware.local_machine import (
    DetectedHardware,
    MemoryReading,
    cluster_of,
    cores_here,
    device_named,
    host_memory_bytes,
    machine_at_hand,
    read_memory,
    resized,
)
from argosy.plan.hardware.measurements import CollectiveRate, MatmulRate, Measurements

TWO_CORES = DetectedHardware("cpu", processes=2, per_node=2, peak_flops_per_s={"fp32": 5e10})
SEND = CollectiveRate(operation="send", tier="node", ranks=2, groups=1, from_bytes=1, latency_s=1e-4, bytes_per_s=1e9)
MATMUL = MatmulRate(m=8, k=8, n=8, kind="square", number_format="fp32", flops_per_s=1e10)
FOUND = Measurements(host=socket.gethostname(), layer_host_s=1e-3, collectives=(SEND,), matmuls=(MATMUL,))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def asked(cluster: str = "") -> RunConfig:
    return load("demo", {"launch.cluster": cluster})


def probed(host: str = FOUND.host, processes: int = 2) -> Cluster:
    return Cluster.parse(f"{processes}xcpu").model_copy(update={"measured": FOUND.model_copy(update={"host": host})})


@pytest.mark.parametrize(
    ("driver_s", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Server"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI350X", "MI350X"),
    ],
)
def test_drivers_names_are_found_in_the_catalogue(driver_s, name):
    assert find_device(device_named(driver_s)).name == name


def test_a_probe_of_this_host_is_taken_and_one_of_another_host_is_not(tmp_path):
    assert cluster_of(asked()) is None
    probed().save(tmp_path / "cluster.toml")
    assert cluster_of(asked()) == probed()
    probed(host="elsewhere").save(tmp_path / "cluster.toml")
    assert cluster_of(asked()) is None
    (tmp_path / "cluster.toml").write_text("name = 3")
    assert cluster_of(asked()) is None


def test_what_the_run_file_names_comes_first(tmp_path):
    probed().save(tmp_path / "cluster.toml")
    assert cluster_of(asked("8xh100")) == Cluster.parse("8xh100")
    with pytest.raises(UserError, match=r"launch\.cluster: no device is called 'h1000'; did you mean h100"):
        cluster_of(asked("8xh1000"))


def test_a_cpu_that_nobody_probed_is_as_fast_as_the_run_found_it():
    cluster = machine_at_hand(asked(), TWO_CORES)
    assert cluster.devices == 2 and cluster.device.matmul_flops_per_s("fp32") == 5e10


def test_a_gpu_is_the_catalogues_if_that_knows_it():
    cluster = machine_at_hand(asked(), DetectedHardware("NVIDIA H100 80GB HBM3", 16, 8, {"bf16": 6e14}))
    assert (cluster.device.name, cluster.nodes, cluster.devices) == (Cluster.parse("8xh100").device.name, 2, 16)
    assert machine_at_hand(asked(), DetectedHardware("NVIDIA H999", 8, 8, {"bf16": 6e14})) is None


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_processes_share_what_the_cores_can_do(processes):
    before, after = probed(), resized(probed(), processes)
    assert after.devices == after.devices_per_node == processes
    for rate in (
        lambda cluster: cluster.device.matmul_flops_per_s("fp32"),
        lambda cluster: cluster.device.memory_bytes_per_s,
        lambda cluster: cluster.device.memory_bytes,
        lambda cluster: cluster.measured.matmuls[0].flops_per_s,
        lambda cluster: cluster.device.nameplate_w,
        lambda cluster: price_per_device_h(cluster).mid,
        lambda cluster: 1 / cluster.device.mtbf_h,
    ):
        assert rate(after) * processes == pytest.approx(rate(before) * 2)


def test_what_a_process_does_alone_is_slower_among_more_and_no_faster_among_fewer():
    def seconds(cluster: Cluster) -> tuple[float, float, float]:
        found = cluster.measured
        return found.layer_host_s, found.collectives[0].latency_s, 1e9 / cluster.tiers[0].bandwidth_bytes_per_s

    before = seconds(probed())
    assert seconds(resized(probed(), 1)) == before
    assert seconds(resized(probed(), 8)) == pytest.approx([4 * each for each in before])


def test_links_that_the_file_says_are_shared_as_the_cores_are():
    said = (
        '[[groups]]\ndevice = "cpu"\nnodes = 2\ndevices_per_node = 4\nnic_bytes_per_s = 1e9\nlink_bytes_per_s = 4e9\n'
    )
    network = '[[network]]\nname = "leaf"\ndevices = 8\nbandwidth_bytes_per_s = 8e8\nlatency_s = 1e-5\n'
    Path("ours.toml").write_text(said + network)
    found = resized(Cluster.load(Path("ours.toml")), 16)
    node, leaf = found.tiers
    assert (found.groups[0].nic_bytes_per_s, node.bytes_per_s, leaf.bytes_per_s) == (5e8, 2e9, 4e8)
    assert (node.devices, leaf.devices) == (8, 16)


def test_accelerators_do_not_share():
    assert resized(Cluster.parse("8xh100"), 4) == Cluster.parse("8xh100")


def files(root: Path, **content: str) -> Path:
    for name, text in content.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def proc(tmp_path: Path, cgroup: str) -> Path:
    meminfo = "MemTotal:       65536000 kB\nMemFree: 1 kB\nMemAvailable:   32768000 kB\n"
    return files(tmp_path / "proc", meminfo=meminfo, vmstat="pgfault 7\noom_kill 2\n", self__cgroup=cgroup)


def test_the_machine_is_read(tmp_path):
    reading = read_memory(proc(tmp_path, ""), tmp_path / "none")
    assert reading == MemoryReading(32768000 * 1024, 65536000 * 1024, 0, 2)


def test_a_group_of_version_2_with_a_limit_is_narrower(tmp_path):
    group = tmp_path / "cgroup" / "job" / "inner"
    files(group, memory_DOT_max="max\n", memory_DOT_current="1\n", memory_DOT_events="low 0\noom 3\noom_kill 1\n")
    files(
        group.parent, memory_DOT_max="1000000\n", memory_DOT_current="900000\n",
        memory_DOT_stat="anon 5\ninactive_file 50000\n", memory_DOT_events="oom_kill 99\n",
    )  # fmt: skip
    reading = read_memory(proc(tmp_path, "0::/job/inner\n"), tmp_path / "cgroup")
    assert reading == MemoryReading(150000, 1000000, 1, 2)
    assert host_memory_bytes(proc(tmp_path, "0::/job/inner\n"), tmp_path / "cgroup") == 1000000


def test_a_group_of_version_1_is_read_too(tmp_path):
    group = tmp_path / "cgroup" / "memory" / "job"
    files(
        group, memory_DOT_limit_in_bytes="1000000\n", memory_DOT_usage_in_bytes="600000\n",
        memory_DOT_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
    )  # fmt: skip
    reading = read_memory(proc(tmp_path, "4:memory:/job\n1:cpu:/\n"), tmp_path / "cgroup")
    assert reading == MemoryReading(400000, 1000000, 4, 2)
    assert host_memory_bytes(tmp_path / "proc", tmp_path / "cgroup") == 1000000


@pytest.mark.parametrize(
    ("group", "quota", "cores"),
    [
        ("0::/job/inner", {"job/cpu.max": "250000 100000\n", "job/inner/cpu.max": "max 100000\n"}, 2),
        ("0::/job", {"job/cpu.max": "50000 100000\n"}, 1),
        ("0::/job", {"job/cpu.max": "900000 100000\n"}, 4),
        ("1:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "300000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 3),
        ("1:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_a_quota_of_cpus_counts_as_so_many_cores(tmp_path, monkeypatch, group, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for path, text in quota.items():
        file = tmp_path / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert cores_here(proc(tmp_path, f"{group}\n"), tmp_path / "cgroup") == cores


def test_this_machine_can_be_read():
    reading = read_memory()
    assert 0 < reading.available_bytes <= reading.limit_bytes
