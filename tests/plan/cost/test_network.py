"""Collectives take what ring formulas say, and compressed sums send and keep what their table says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.config.load import load
from argosy.config.sync import SyncConfig
from argosy.plan.cost.collectives import all_reduce_s, all_to_all_s, gather_s, send_s
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.memory_model import MemoryModel
from argosy.plan.cost.network import Compression, group_of
from argosy.plan.cost.rates import Rates, System
from argosy.plan.cost.step_time import StepModel
from argosy.plan.cost.traffic import traffic
from argosy.plan.hardware.devices import find_device
from argosy.plan.hardware.measurements import CompressionRate
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.sync import COMPRESSED, COMPRESSOR_COSTS
from argosy.plan.workload import Workload
from argosy.sync.compressors import COMPRESSOR_OF as CLASSES

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


RUN = load("demo", {"train.steps": 10})
WORK = Workload.of(RUN)
H100, CPU = (
    Rates.of_device(find_device("h100")),
    Rates(**{**vars(Rates.of_device(find_device("h100"))), "host_waits": 1.0}),
)


def layout(word: str, replicas: int = 2) -> Layouts:
    return Layouts.of([Plan.parse(f"dp_replicate={replicas},sync={word}")])


def sent(word: str, replicas: int) -> int:
    return sum(traffic(Plan.parse(f"dp_replicate={replicas},sync={word}"), RUN).values())


def test_each_compressor_has_a_cost():
    assert set(COMPRESSED) == set(CLASSES) - {"exact"}
    for word in COMPRESSED:
        CompressionRate(sync=word, number_s=1e-9)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("word", COMPRESSED)
def test_the_share_is_about_that_of_the_exact_count(word, replicas):
    share = Compression(RUN.sync).share_sent(layout(word, replicas), WORK, replicas)
    # Norms are summed exactly, and a bucket's blocks are whole.
    assert float(share[0]) == pytest.approx(sent(word, replicas) / sent("exact", replicas), rel=0.12, abs=0.001)


def test_an_exact_sum_compresses_nothing():
    found = Compression()
    assert found.seconds(layout("exact"), 1e9, 2, H100) == 0
    assert found.share_sent(layout("exact"), WORK, 2) == 1
    assert found.kept_bytes(layout("exact"), 1e9, 1e9) == 0


def test_on_a_gpu_the_work_follows_from_memory_on_a_cpu_from_measurements():
    plans = layout("int8", 1000)
    on_gpu = float(Compression().seconds(plans, 1e9, 1e9, H100)[0])
    assert on_gpu == pytest.approx(1e9 * (120 / H100.memory_bytes_per_s + 60 * 5e-6 / 2**20))
    assert float(Compression().seconds(plans, 1e9, 1e9, CPU)[0]) == pytest.approx(
        COMPRESSOR_COSTS["int8"].cpu_s * 1e9 * 120 / 190
    )
    probed = Compression(measured_s={"int8": 1e-9})
    assert float(probed.seconds(plans, 1e9, 1e9, H100)[0]) == pytest.approx(120 / 190)
    assert float(probed.seconds(plans, 1e9, 1, H100)[0]) == 0.0, "a replica alone sums nothing"


def test_a_step_pays_for_the_work_and_hides_a_part_of_it_behind_the_link():
    def step_s(word: str, link: float, compression: Compression) -> float:
        rates = Rates(**{**vars(CPU), "node": 1, "nic_bytes_per_s": link})
        plans = layout(word)
        return float(StepModel(plans, WORK, rates, System(), Constants(), compression).predict().total[0])

    free, slow = Compression(measured_s={"int8": 1e-15}), Compression(measured_s={"int8": 100e-9})
    numbers = float(WORK.matrix_parameters) * (120 + 35) / 190 * 100e-9
    assert step_s("int8", 1e12, slow) - step_s("int8", 1e12, free) == pytest.approx(numbers, rel=0.05)
    assert 0 < step_s("int8", 1e7, slow) - step_s("int8", 1e7, free) < 0.5 * numbers


def test_residuals_and_outer_state_are_a_part_of_memory():
    def kept(word: str, plan: str = "dp_replicate=2", **settings: bool) -> float:
        plans = Layouts.of([Plan.parse(f"{plan},sync={word}")])
        return float(
            MemoryModel(plans, WORK, System(), Constants(), Compression(SyncConfig(**settings))).predict().agreement[0]
        )

    numbers = float(WORK.matrix_parameters)
    assert kept("int8") == pytest.approx(8 * numbers)
    assert kept("sign") == pytest.approx(16 * numbers)
    assert kept("int8", error_feedback=False) == kept("bf16") == kept("exact") == 0
    assert kept("int8", plan="dp_replicate=2,dp_shard=4,zero=1") == pytest.approx(2 * numbers)
    assert kept("diloco") == pytest.approx(8 * numbers)
    assert kept("local") == pytest.approx(4 * numbers)
