"""Collectives take what ring formulas say, on the links that a group spans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.plan.cost.constants import Constants
from argosy.plan.cost.network import all_reduce_s, all_to_all_s, gather_s, group_of, send_s
from argosy.plan.cost.rates import Rates
from argosy.plan.hardware.devices import find_device

NODE = replace(Rates.of_device(find_device("h100")), link_bytes_per_s=400e9, nic_bytes_per_s=50e9, reduction_gain=1.0)
FREE = Constants(link=1.0, nic=1.0, latency=1e-30, hop=1e-30)
GB = 1e9


@pytest.mark.parametrize(
    ("ranks", "stride", "inside", "bandwidth"),
    [
        (8, 1, 8, 400e9),  # a node
        (4, 2, 4, 400e9),  # every other device of one
        (16, 1, 8, 400e9),  # two nodes: eight adapters are as fast as the link
        (8, 8, 1, 50e9),  # one device of each of eight nodes
        (8, 4, 2, 100e9),  # two of each
        (2, 1, 2, 400e9),
    ],
)
def test_a_group_has_the_links_that_it_spans(ranks, stride, inside, bandwidth):
    group = group_of(ranks, stride, NODE, FREE)
    assert (group.inside, group.ring) == (inside, bandwidth)
    assert bool(group.crosses) == (inside < ranks)


def test_ring_formulas():
    group = group_of(4, 1, NODE, FREE)
    assert gather_s(GB, group) == pytest.approx(3 / 4 * GB / 400e9)
    assert all_reduce_s(GB, group) == pytest.approx(2 * 3 / 4 * GB / 400e9)
    assert send_s(GB, group) == pytest.approx(GB / 400e9)


def test_an_all_to_all_waits_for_the_slower_of_both_links():
    group = group_of(16, 1, NODE, FREE)  # half of each rank's message is for the other node
    assert all_to_all_s(GB, group) == pytest.approx(0.5 * GB / 50e9)
    assert all_to_all_s(GB, group, crossing=0.01) == pytest.approx(7 / 16 * GB / 400e9)


def test_alone_nothing_is_sent():
    group = group_of(1, 1, NODE, Constants())
    assert (gather_s(GB, group), all_reduce_s(GB, group), all_to_all_s(GB, group)) == (0, 0, 0)


def test_small_messages_take_the_tree_of_an_all_reduce_and_the_ring_of_a_gather():
    slow = replace(FREE, latency=1e-5, hop=1e-5)
    many = group_of(1024, 8, NODE, slow)
    assert gather_s(1, many) == pytest.approx(1e-5 + 1023e-5, rel=1e-3)
    assert all_reduce_s(1, many) == pytest.approx(2e-5 + 2 * 10e-5, rel=1e-3)


def test_the_switch_adds_up_inside_a_node_only():
    gaining = replace(NODE, reduction_gain=1.5)
    within, across = group_of(8, 1, gaining, FREE), group_of(16, 1, gaining, FREE)
    assert all_reduce_s(GB, within) == pytest.approx(2 * 7 / 8 * GB / 600e9)
    assert all_reduce_s(GB, within, in_switch=False) == pytest.approx(2 * 7 / 8 * GB / 400e9)
    assert all_reduce_s(GB, across) == pytest.approx(2 * 15 / 16 * GB / 400e9)


def test_a_ring_enters_and_leaves_a_site_by_the_shares_of_its_ranks_there() -> None:
    thin = replace(NODE, site=16, far_bytes_per_s=1e6, far_latency_s=0.01)
    whole, one_of_each, inside = (group_of(*group, thin, FREE) for group in ((32, 1), (2, 16), (16, 1)))
    assert (whole.ring, one_of_each.ring, inside.ring) == (16e6, 1e6, 400e9)
    assert send_s(GB, whole) == pytest.approx(GB / 1e6 + 0.01)
    assert send_s(GB, inside) == pytest.approx(GB / 50e9)
    assert gather_s(0.0, one_of_each) == pytest.approx(0.02)
