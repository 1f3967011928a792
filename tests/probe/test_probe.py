"""Measurements become a cluster: what was measured replaces guesses, the rest stays the catalogue's, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pytest import approx

from argosy.errors import UserError
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import find_device
from argosy.plan.hardware.measurements import CollectiveRate, MatmulRate, Measurements
from argosy.probe.probe import Machine, as_cluster, catalogue_device


def row(operation: Any, tier: str, ranks: int, groups: int, from_bytes: int, rate: float) -> CollectiveRate:
    return CollectiveRate(
        operation=operation,
        tier=tier,
        ranks=ranks,
        groups=groups,
        from_bytes=from_bytes,
        latency_s=1e-5 + from_bytes * 1e-9,
        bytes_per_s=rate,
    )


def square(number_format: Any, rate: float, size: int = 1024) -> MatmulRate:
    return MatmulRate(m=size, k=size, n=size, kind="square", number_format=number_format, flops_per_s=rate)


MEASURED = Measurements(
    date="2026-11-21",
    memory_copy_bytes_per_s=5e9,
    disk_write_bytes_per_s=3e8,
    matmuls=(square("fp32", 50e9), square("fp32", 70e9), square("bf16", 20e9)),
    collectives=(
        row("all_reduce", "node", 2, 2, 1024, 1e9),
        row("all_reduce", "node", 4, 1, 1024, 2e9),
        row("all_reduce", "node", 4, 1, 2**20, 3e9),
        row("send", "node", 4, 1, 1024, 1e9),
        row("send", "node", 4, 1, 2**20, 4e9),
        row("send", "network", 2, 1, 1024, 9e8),
        row("send", "network", 2, 4, 1024, 2e8),
        row("send", "network", 2, 4, 2**20, 3e8),
    ),
)
LAPTOP = Machine("cpu", ("here",) * 4, 4e9, "torch 2.13")
TWO_NODES = Machine("accelerator", ("a",) * 4 + ("b",) * 4, 150e9, "torch 2.13")


def test_a_cpu_is_what_was_measured_of_it() -> None:
    cluster = as_cluster(find_device("cpu"), LAPTOP, MEASURED)
    device = cluster.device
    assert device.matmul_flops_per_s("fp32") == 70e9 and device.matmul_flops_per_s("bf16") == 20e9
    assert (device.memory_bytes, device.memory_bytes_per_s, device.link_bytes_per_s) == (4e9, 5e9, 4e9)
    assert device.ring_busbw_bytes_per_s == approx(2 * 3 / 4 * 3e9) and device.link_latency_s == approx(1.1e-5, rel=0.1)
    assert (cluster.nodes, cluster.devices_per_node, cluster.storage_bytes_per_s) == (1, 4, 3e8)
    assert "nic_bytes_per_s" in device.assumed and "memory_bytes" not in device.assumed
    assert device.price_usd_per_h == find_device("cpu").price_usd_per_h


def test_a_gpu_keeps_its_specification_and_gets_its_share() -> None:
    h200 = find_device("h200")
    measured = MEASURED.model_copy(update={"matmuls": (square("bf16", 0.7 * h200.peak("bf16"), 8192),)})
    device = as_cluster(h200, TWO_NODES, measured).device
    assert device.peak_flops_per_s == h200.peak_flops_per_s and device.link_bytes_per_s == h200.link_bytes_per_s
    assert device.efficiency("bf16") == approx(0.7)
    assert device.usable_bytes == TWO_NODES.memory_bytes, "torch sees no part of what the driver keeps"


def test_two_nodes_are_joined_by_what_all_devices_get_at_once() -> None:
    cluster = as_cluster(find_device("h200"), TWO_NODES, MEASURED)
    node, network = cluster.tiers
    assert (node.devices, network.devices, network.bytes_per_s) == (4, 8, 3e8)
    assert cluster.groups[0].nic_bytes_per_s == 3e8


def test_the_file_reads_back_as_it_was(tmp_path: Path) -> None:
    for machine, name in ((LAPTOP, "cpu"), (TWO_NODES, "h200")):
        cluster = as_cluster(find_device(name), machine, MEASURED)
        cluster.save(tmp_path / "cluster.toml")
        assert Cluster.load(tmp_path / "cluster.toml") == cluster
        assert cluster.measured == MEASURED


def test_a_link_whose_fit_begins_at_no_time_at_all_reads_back(tmp_path: Path) -> None:
    through_0 = tuple(rate.model_copy(update={"latency_s": 0.0}) for rate in MEASURED.collectives)
    for machine, name in ((LAPTOP, "cpu"), (TWO_NODES, "h200")):
        cluster = as_cluster(find_device(name), machine, MEASURED.model_copy(update={"collectives": through_0}))
        cluster.save(tmp_path / "cluster.toml")
        assert Cluster.load(tmp_path / "cluster.toml").device.link_latency_s > 0


def test_one_process_needs_no_collectives() -> None:
    measured = MEASURED.model_copy(update={"collectives": ()})
    device = as_cluster(find_device("cpu"), Machine("cpu", ("here",), 4e9, ""), measured).device
    assert device.link_bytes_per_s == find_device("cpu").link_bytes_per_s and "link_bytes_per_s" in device.assumed


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_the_driver_s_name_finds_the_device(monkeypatch: pytest.MonkeyPatch, said: str, name: str) -> None:
    monkeypatch.setattr("argosy.probe.probe.device_name", lambda _: said)
    assert catalogue_device("accelerator", None) == find_device(name)


def test_an_unknown_device_is_asked_for_and_never_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.probe.probe.device_name", lambda _: "NVIDIA H100 NVL")
    with pytest.raises(UserError, match=r"'NVIDIA H100 NVL'.*did you mean.*--device"):
        catalogue_device("accelerator", None)
    assert catalogue_device("accelerator", "h100-pcie") == find_device("h100-pcie")
