"""A device from its data sheet: units, what is assumed, and figures that cannot be."""

from __future__ import annotations

import pytest

from argosy.errors import UserError
from argosy.plan.cost.constants import time_std
from argosy.plan.hardware.clusters import Cluster, NodeGroup
from argosy.plan.hardware.devices import DataSheet, find_device

SHEET = DataSheet({"bf16": 165.2, "fp8": 330.3}, memory_gb=24, memory_gb_s=1008)
WHOLE = DataSheet(
    {"bf16": 165.2},
    24,
    1008,
    usable_gb=23.5,
    efficiency=0.9,
    link_gb_s=64,
    nic_gb_s=12.5,
    devices_per_node=4,
    power_w=450,
)


def test_figures_are_turned_into_the_catalogue_s_units():
    device = WHOLE.device("mine")
    assert device.peak("bf16") == 165.2e12 and device.matmul_flops_per_s("bf16") == pytest.approx(0.9 * 165.2e12)
    assert (device.memory_bytes, device.usable_bytes, device.memory_bytes_per_s) == (24 * 2**30, 23.5 * 2**30, 1008e9)
    assert (device.link_bytes_per_s, device.nic_bytes_per_s, device.power_w) == (64e9, 12.5e9, 450)
    assert device.devices_per_node == device.devices_per_host == 4
    assert not {"matmul_efficiency", "link_bytes_per_s", "nic_bytes_per_s"} & set(device.assumed)


def test_what_the_sheet_leaves_out_is_assumed_and_widens_the_interval():
    device = SHEET.device("mine")
    assert {"reserved_bytes", "matmul_efficiency", "link_bytes_per_s", "nic_bytes_per_s"} < set(device.assumed)
    assert device.usable_bytes < device.memory_bytes and "fp16" not in device.formats
    known, guessed = (Cluster(groups=(NodeGroup(device=d, nodes=1),)) for d in (WHOLE.device("a"), device))
    assert time_std(guessed, experts=False) > time_std(known, experts=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tflops": {}}, "no matmul rate is given. Give the dense one, e.g. --bf16-tflops"),
        ({"tflops": {"fp16": -1.0}}, "--fp16-tflops -1.0: must be a finite number above 0"),
        ({"memory_gb": float("inf")}, "--memory-gb inf: must be a finite number above 0"),
        ({"devices_per_node": 0}, "--devices-per-node 0: must be"),
        ({"usable_gb": 25.0}, "--usable-gb 25.0: must be at most 24"),
        ({"efficiency": 1.2}, "--efficiency 1.2: must be at most 1"),
    ],
)
def test_figures_that_cannot_be_are_named_by_their_option(changes, message):
    with pytest.raises(UserError, match=message):
        DataSheet(**{**vars(SHEET), **changes}).device("mine")


def test_the_catalogue_s_names_are_taken():
    with pytest.raises(UserError, match="H100: the catalogue has it already"):
        SHEET.device("H100")


def test_a_card_of_the_catalogue_comes_out_of_its_sheet():
    card = find_device("rtx-4090")
    ours = DataSheet({"bf16": 165.2}, 24, 1008, usable_gb=23.52, efficiency=0.85, link_gb_s=32).device("mine")
    assert ours.matmul_flops_per_s("bf16") == card.matmul_flops_per_s("bf16")
    assert ours.usable_bytes == pytest.approx(card.usable_bytes, rel=1e-3)
    assert ours.link_bytes_per_s == card.link_bytes_per_s
