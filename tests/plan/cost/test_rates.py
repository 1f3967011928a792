"""A cluster's rates, as a plan that deals work out evenly sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.plan.cost.rates import Rates
from argosy.plan.hardware.clusters import Cluster, NetworkTier
from argosy.plan.hardware.devices import find_device


def test_alike_devices_are_the_device_and_its_network() -> None:
    cluster = Cluster.parse("256xh100")
    assert Rates.of(cluster) == Rates.of_device(find_device("h100"))


def test_part_of_a_node_is_a_node() -> None:
    assert Rates.of(Cluster.parse("4xh100")).node == 4


def test_of_mixed_devices_each_rate_is_the_slowest_one_s() -> None:
    mixed = Rates.of(Cluster.parse("8xh100+8xa100-40"))
    h100, a100 = (Rates.of_device(find_device(name)) for name in ("h100", "a100-40"))
    for name in ("half", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "nic_bytes_per_s"):
        assert getattr(mixed, name) == min(getattr(h100, name), getattr(a100, name))
    assert mixed.achieved_half == a100.achieved_half


def test_a_group_s_own_link_scales_what_was_measured() -> None:
    cluster = Cluster.parse("8xh100")
    group = cluster.groups[0].model_copy(update={"link_bytes_per_s": cluster.groups[0].link_bytes_per_s / 2})
    halved = Rates.of(cluster.model_copy(update={"groups": (group,)}))
    assert halved.link_bytes_per_s == pytest.approx(Rates.of(cluster).link_bytes_per_s / 2)
    assert replace(halved, link_bytes_per_s=0) == replace(Rates.of(cluster), link_bytes_per_s=0)


def test_the_first_tier_outside_the_node_is_the_network() -> None:
    leaf = NetworkTier(name="leaf", devices=64, bandwidth_bytes_per_s=40e9, latency_s=1e-5, oversubscription=2)
    spine = NetworkTier(name="spine", devices=256, bandwidth_bytes_per_s=10e9, latency_s=1e-5)
    cluster = Cluster.parse("256xh100").model_copy(update={"network": (leaf, spine)})
    assert Rates.of(cluster).nic_bytes_per_s == 20e9
