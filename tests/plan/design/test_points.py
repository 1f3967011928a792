"""The devices of a space as columns: the base's own figures give the base, and technology moves them as published."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from pytest import approx
from tests.plan.design.conftest import Load

from argosy.errors import UserError
from argosy.plan.cost.rates import Rates
from argosy.plan.design.points import MEMORY_DRAWS_ALL, Points
from argosy.plan.hardware.devices import find_device
from argosy.plan.hardware.technology import good_dies, logic_nodes, memory_generations, scaling


@pytest.mark.parametrize("base", ["h100", "a100", "mi300x", "gaudi3", "tpu-v5p", "trainium3"])
def test_a_space_of_no_figures_is_its_base(load: Load, base: str) -> None:
    points, own = Points.of(load(base=f'"{base}"')), Rates.of_device(find_device(base))
    assert len(points) == 1
    rates = points.rates()
    for f in fields(Rates):
        if getattr(own, f.name) is None:
            continue
        assert np.ravel(getattr(rates, f.name))[0] == approx(getattr(own, f.name), rel=1e-6), f.name


@pytest.mark.parametrize(("base", "half"), [("a100", "bf16"), ("v100", "fp16")])
def test_a_format_that_a_base_lacks_is_computed_in_16_bits(load: Load, base: str, half: str) -> None:
    points = Points.of(load(base=f'"{base}"'))
    assert {points.computed(wanted) for wanted in ("bf16", "fp8", "fp4")} == {half}


def test_the_base_s_own_silicon_gives_its_own_rates_and_power(load: Load) -> None:
    points = Points.of(load(node='"N5"', memory_bytes_per_s="3.35e12"))
    assert points.flops_per_s["bf16"][0] == approx(989e12) and points.power_w[0] == approx(700)
    assert points.usd_per_h[0] == approx(2.95)


def test_more_area_brings_no_more_than_the_power_drives(load: Load) -> None:
    points = Points.of(load(node='"N5"', dies="[1, 2]", power_w="[700, 1400]"))
    one, more_power, more_area, both = points.flops_per_s["bf16"]
    assert more_power == approx(one) and more_area == approx(one, rel=1e-6)  # an H100 uses its power and its area
    assert both > 1.9 * one
    assert points.power_w[1] == approx(700)  # what fits by area and needs less draws less


def test_a_finer_node_holds_and_drives_more(load: Load) -> None:
    points = Points.of(load(node='["N12", "N7", "N5", "N3E", "N2"]', price_usd_per_h="1"))
    assert (np.diff(points.flops_per_s["bf16"]) > 0).all() and (points.power_w <= 700.001).all()


def test_memory_that_draws_all_the_power_is_no_device(load: Load) -> None:
    some = Points.of(load(node='"N5"', memory='["HBM3", "HBM4"]', stacks="12", power_w="[400]"))
    assert len(some) == 1 and some.impossible == {MEMORY_DRAWS_ALL: 1}
    with pytest.raises(UserError, match=r"device\.power_w = 100.0: memory alone draws .* in every one of the 1"):
        Points.of(load(node='"N5"', memory='"HBM4"', stacks="12", power_w="[100]"))


def test_chips_and_networks_of_a_block_broadcast_to_its_points(load: Load) -> None:
    """Also where some chips are impossible: 200 W do not drive eight stacks of HBM4."""
    figures = {
        "node": '["N5", "N3E"]',
        "power_w": "[200, 700, 1000]",
        "memory": '["HBM2", "HBM4"]',
        "stacks": "[4, 8]",
        "link_bytes_per_s": "[225e9, 450e9]",
        "devices_per_node": "[8, 64]",
        "nic_bytes_per_s": "[25e9, 50e9, 100e9]",
        "price_usd_per_h": "[2, 3]",
    }
    points = Points.of(load(**figures))
    assert points.impossible and points.networks == 24
    seen = []
    for block in points.blocks(100):
        columns, apart = points.rates("fp8", block.rows), points.rates("fp8", block.chips, block.networks)
        for figure in fields(Rates):
            if np.ndim(getattr(columns, figure.name)):
                assert block.flat(getattr(apart, figure.name)) == approx(getattr(columns, figure.name)), figure.name
        seen += np.arange(len(points))[block.rows].tolist()
    assert seen == list(range(len(points)))


def test_a_small_cache_starves_large_matmuls(load: Load) -> None:
    points = Points.of(load(cache_bytes="[1e5, 50e6]"))
    assert points.achieved["bf16"][0] < 0.5 * points.achieved["bf16"][1]
    assert points.achieved["bf16"][1] == approx(find_device("h100").efficiency("bf16"))


def test_technology_has_a_source_for_every_row_and_moves_one_way() -> None:
    assert all(row.source for row in (*logic_nodes().values(), *memory_generations().values()))
    nodes = [scaling(name) for name in logic_nodes()]
    assert [density for density, _ in nodes] == sorted(density for density, _ in nodes)
    assert min(node.nm for node in logic_nodes().values()) == 1.0
    rates = [one.bytes_per_s for one in memory_generations().values()]
    assert rates == sorted(rates)


def test_larger_dies_yield_less() -> None:
    assert 0 < good_dies(814) < 0.5 * good_dies(400)
