"""The catalogue of devices: every file holds together, names are found, and none is ever guessed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from argosy.config.layers import preset_names, preset_path
from argosy.errors import UserError
from argosy.plan.cost.constants import time_std
from argosy.plan.hardware.clusters import Cluster, NodeGroup
from argosy.plan.hardware.data_sheet import DataSheet
from argosy.plan.hardware.devices import find_device

DEVICES = preset_names("devices")


@pytest.mark.parametrize("name", DEVICES)
def test_every_preset_is_a_device_that_its_name_and_aliases_find(name):
    device = find_device(name)
    names = (device.name, *device.aliases)
    assert all(find_device(other.upper()) is find_device(other.replace("-", "")) is device for other in names)


def test_no_two_devices_share_a_name_hyphens_apart():
    names = [
        name
        for preset in DEVICES
        for name in {
            known.replace("-", "").lower() for known in (preset, *find_device(preset).aliases, find_device(preset).name)
        }
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", DEVICES)
def test_figures_are_in_their_units(name):
    device = find_device(name)
    core = name == "cpu"
    assert 1e9 < device.usable_bytes <= device.memory_bytes < 400 * 2**30
    assert core or 2e11 < device.memory_bytes_per_s < 1e13
    assert core or 5e12 < device.best_flops_per_s < 3e15
    assert device.nic_bytes_per_s < device.link_bytes_per_s < device.memory_bytes_per_s
    assert device.devices_per_node % device.devices_per_host == 0
    assert all(0.3 < device.efficiency(fmt) <= 1 for fmt in device.formats)
    assert device.ring_bytes_per_s <= device.link_bytes_per_s
    unknown = set(device.assumed) - type(device).model_fields.keys()
    assert not unknown


def test_units_and_prices_of_a_device_that_everybody_knows():
    h100 = find_device("h100")
    assert (h100.name, h100.peak("bf16"), h100.memory_bytes) == ("H100-SXM", 989e12, 80 * 2**30)
    assert h100.matmul_flops_per_s("bf16") == pytest.approx(794.5e12, rel=1e-3)
    assert (h100.link_bytes_per_s, h100.nic_bytes_per_s) == (450e9, 400e9 / 8)
    assert (h100.price_low_usd_per_h, h100.price_usd_per_h, h100.price_high_usd_per_h) == (1.99, 2.95, 5.00)
    assert h100.mtbf_h is None, "how often it fails, the catalogue of failures says"


@pytest.mark.parametrize(
    ("name", "bf16", "gib", "gb_s", "watts"),
    [
        ("rtx-3090", 71.2, 24, 936, 350),
        ("rtx-4090", 165.2, 24, 1008, 450),
        ("rtx-5090", 209.5, 32, 1792, 575),
        ("rtx-6000-ada", 364.2, 48, 960, 300),
        ("rtx-pro-6000", 503.8, 96, 1792, 600),
        ("l4", 121, 24, 300, 72),
        ("l40s", 362.05, 48, 864, 350),
        ("a10g", 70, 24, 600, 300),
        ("mi350x", 2300, 288, 8000, 1000),
    ],
)
def test_cards_have_the_dense_rates_with_fp32_accumulation_of_their_data_sheets(name, bf16, gib, gb_s, watts):
    device = find_device(name)
    assert device.peak("bf16") == device.peak("fp16") == bf16 * 1e12
    assert (device.memory_bytes, device.memory_bytes_per_s, device.power_w) == (gib * 2**30, gb_s * 1e9, watts)
    assert set(device.formats) & {"fp8"} == (set() if name in ("rtx-3090", "a10g") else {"fp8"})


@pytest.mark.parametrize("name", DEVICES)
def test_nvidias_devices_have_a_compute_capability_and_no_others(name):
    device = find_device(name)
    assert (device.compute_capability is not None) is (device.vendor == "NVIDIA")
    if device.compute_capability is not None:
        assert ("fp8" in device.formats) is (device.compute_capability >= 8.9)


@pytest.mark.parametrize(
    ("name", "precision", "has_experts", "message"),
    [
        ("h100", "mxfp8", False, r"needs .* capability 10 .*; this one is H100-SXM .* Try precision=fp8_rowwise\."),
        ("b200", "fp8_rowwise", True, r"with experts needs .* 9\.0 \(Hopper\).* \(compute capability 10\.0\)"),
        ("b200", "mxfp8", False, None),
        ("b200", "fp8_blockwise", False, r"fp8_blockwise needs .* 9\.0 \(Hopper\).* Try precision=fp8_rowwise"),
        ("h100", "fp8_blockwise", False, None),
        ("h200", "fp8_rowwise", True, None),
        ("rtx-5090", "mxfp8", False, r"compute capability 12\.0"),
        ("rtx-5090", "fp8", False, None),
        ("mi300x", "fp8", False, None),
        ("mi300x", "fp8_rowwise", True, r"with experts needs .*; this one is MI300X\. Try"),
        ("mi250x-gcd", "fp8", False, r"AMD's from CDNA 3 on; this one is MI250X-GCD, whose description has no"),
        (
            "gaudi3",
            "fp8",
            False,
            r"Gaudi-3, whose description has no compute_capability\. Try precision=bf16",
        ),
        ("t4", "fp8", False, r"Try precision=fp16 or fp32\."),
    ],
)
def test_eight_bits_are_multiplied_where_their_kernels_run(name, precision, has_experts, message):
    problem = find_device(name).why_not_in(precision, has_experts)
    assert (problem is None) if message is None else re.search(message, problem)


def test_a_data_sheet_that_says_the_compute_capability_may_have_fp8():
    sheet = replace(SHEET, compute_capability=8.9)
    assert sheet.device("mine").why_not_in("fp8", False) is None
    assert "no compute_capability" in SHEET.device("mine").why_not_in("fp8", False)
    without = replace(sheet, fp8_tflops=None).device("mine")
    assert without.why_not_in("fp8", False) == "plan.precision = fp8: mine has no fp8 matmuls. Try precision=bf16."


def test_a_t4_has_neither_bf16_nor_tf32():
    assert find_device("t4").formats == ("fp32", "fp16") and find_device("t4").peak("fp16") == 65e12


@pytest.mark.parametrize(
    ("written", "name"),
    [("V100-32", "V100-SXM2-32"), ("a100", "A100-80"), ("A100_80", "A100-80"), ("gh200", "GH200-H100"), ("cpu", "CPU")],
)
def test_other_spellings_are_found(written, name):
    assert find_device(written).name == name


def test_an_efficiency_that_nobody_measured_is_that_of_the_nearest_format():
    h100 = find_device("h100")
    assert h100.efficiency("tf32") == h100.efficiency("fp16") == h100.matmul_efficiency.bf16
    assert h100.efficiency("fp8") == h100.matmul_efficiency.fp8


def test_a_format_that_the_device_has_not_is_refused():
    with pytest.raises(UserError, match=r"V100-SXM2-32 has no bf16 matmuls. Try fp32 or fp16"):
        find_device("v100").peak("bf16")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h1000", r"no device is called 'h1000'; did you mean h100"),
        ("abacus", r"there are: a100-40, .*, v100-sxm2-32. Or write its data sheet's figures"),
        ("./none.toml", r"none.toml: cannot be read"),
    ],
)
def test_an_unknown_device_is_an_error_with_suggestions(name, message):
    with pytest.raises(UserError, match=message):
        find_device(name)


def test_a_file_of_the_same_keys_adds_a_device(tmp_path):
    text = preset_path("devices", "h100-sxm").read_text().replace("nic_bytes_per_s = 50e9", "nic_bytes_per_s = 5e9")
    path = tmp_path / "slow.toml"
    path.write_text(text)
    assert find_device(str(path)) == find_device("h100").model_copy(update={"nic_bytes_per_s": 5e9})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("power_w = 700", "powr_w = 700", r"powr_w = 700: unknown key; did you mean power_w"),
        ("power_w = 700", "mtbf_h = 0", r"mtbf_h = 0: must be a finite number above 0"),
        ("fp8 = 1.979e15", "fp7 = 1.979e15", r"peak_flops_per_s.fp7 = 1979000000000000.0: unknown key; did you mean"),
        ("price_usd_per_h = 2.95", "price_usd_per_h = 9.0", r"price_usd_per_h needs all three"),
        ("bf16 = 989e12", "bf16 = 989", r"peak_flops_per_s\.bf16 = 989 lies outside of .* Give FLOP/s"),
        (
            "memory_bytes_per_s = 3.35e12",
            "memory_bytes_per_s = 3.35e15",
            r"memory_bytes_per_s = 3\.35e\+15 lies",
        ),
        ("bf16 = 0.8033", "bf16 = 1.2", r"matmul_efficiency\.bf16 = 1\.2: must be a finite number .* of at most 1"),
        ("memory_bytes_per_s = 3.35e12", "memory_bytes_per_s = 3.35", r"memory_bytes_per_s = 3\.35 lies outside"),
        (
            "link_bytes_per_s = 450e9",
            "link_bytes_per_s = 3600e9",
            r"link_bytes_per_s = 3\.6e\+12 is 107 % of the mem",
        ),
        (
            "ring_busbw_bytes_per_s = 366e9",
            "ring_busbw_bytes_per_s = 660e9",
            r"ring_busbw_bytes_per_s = .* is 147 % .* one way\.$",
        ),
        ("power_w = 700", "power_w = 0.7", r"peak_flops_per_s\.\w+ = .* at power_w = 0\.7 .* Give FLOP/s and watts"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_line(tmp_path, old, new, message):
    path = tmp_path / "mine.toml"
    path.write_text(preset_path("devices", "h100-sxm").read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=rf"mine.toml:\d+: {message}"):
        find_device(str(path))


@pytest.mark.parametrize("card", ["3090", "4090", "5090"])
def test_geforce_cards_sum_through_the_host(card):
    device = find_device(card)
    assert device.ring_bytes_per_s < 0.5 * device.link_bytes_per_s


SHEET = DataSheet(memory_gb=24, memory_gb_s=1008, bf16_tflops=165.2, fp8_tflops=330.3)
WHOLE = DataSheet(
    memory_gb=24,
    memory_gb_s=1008,
    bf16_tflops=165.2,
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
        ({"bf16_tflops": None, "fp8_tflops": None}, "no matmul rate is given. Give the dense one, e.g. --bf16-tflops"),
        ({"fp16_tflops": -1.0}, "--fp16-tflops -1.0: must be a finite number above 0"),
        ({"memory_gb": float("inf")}, "--memory-gb inf: must be a finite number above 0"),
        ({"devices_per_node": 0}, "--devices-per-node 0: must be"),
        ({"usable_gb": 25.0}, "--usable-gb 25.0: must be at most 24"),
        ({"efficiency": 1.2}, "--efficiency 1.2: must be at most 1"),
    ],
)
def test_figures_that_cannot_be_are_named_by_their_option(changes, message):
    with pytest.raises(UserError, match=message):
        replace(SHEET, **changes).device("mine")


def test_the_catalogue_s_names_are_taken():
    with pytest.raises(UserError, match="H100: the catalogue has it already"):
        SHEET.device("H100")


def test_a_card_of_the_catalogue_comes_out_of_its_sheet():
    card = find_device("rtx-4090")
    ours = replace(SHEET, usable_gb=23.52, efficiency=0.85, link_gb_s=32).device("mine")
    assert ours.matmul_flops_per_s("bf16") == card.matmul_flops_per_s("bf16")
    assert ours.usable_bytes == pytest.approx(card.usable_bytes, rel=1e-3)
    assert ours.link_bytes_per_s == card.link_bytes_per_s


@pytest.mark.parametrize("name", ["gaudi3", "trainium3", "ascend-910c", "tpu-v5p"])
def test_a_device_that_nobody_has_run_says_so(name):
    device = find_device(name)
    assert device.never_run and f"Nobody has compared a run on {device.name}" in device.caveats[0]
    assert not find_device("h100").never_run
