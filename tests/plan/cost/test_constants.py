"""What a probe measured takes the place of what published runs say."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from argosy.config.load import load
from argosy.plan.cost.constants import (
    BACKWARD_ATTENTION,
    INTENSITY,
    constants_of,
    fitted,
    memory_std,
    time_std,
)
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.prediction import predict
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import Efficiencies, PeakFlops
from argosy.plan.hardware.measurements import AttentionRate, CollectiveRate, MatmulRate, Measurements
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan

RATE, MEMORY_RATE = 100e9, 10e9


def probed(**found: Any) -> Cluster:
    """Two processes on CPU cores of `RATE`, as a probe would write them."""
    cluster = Cluster.parse("2xcpu")
    measured = {
        "peak_flops_per_s": PeakFlops(fp32=RATE),
        "matmul_efficiency": Efficiencies(fp32=1.0),
        "memory_bytes_per_s": MEMORY_RATE,
        "assumed": (),
    }
    group = cluster.groups[0].model_copy(update={"device": cluster.device.model_copy(update=measured)})
    return Cluster(groups=(group,), measured=Measurements(**found) if found else None)


def test_accelerators_that_nobody_probed_have_the_fitted_constants():
    assert constants_of(Cluster.parse("8xh100")) == fitted()[0]


def test_on_cpus_nothing_hides_behind_computing():
    constants = constants_of(probed())
    assert {constants.exposed_tensor, constants.exposed_gradients, constants.exposed_pipeline} == {1.0}
    assert constants.workspace_bytes < fitted()[0].workspace_bytes / 5


def test_matmuls_of_the_models_shapes_say_how_much_slower_small_ones_are():
    half = 60 * RATE / MEMORY_RATE / INTENSITY
    rows = tuple(
        MatmulRate(
            m=m,
            k=k,
            n=n,
            kind="forward",
            number_format="fp32",
            flops_per_s=0.8 * RATE / (1 + half / m + half / k + half / n),
        )
        for m, k, n in product((16, 512), (32, 256), (8, 1024))
    )
    constants = constants_of(probed(matmuls=rows))
    assert constants.matmul == pytest.approx(0.8, rel=0.02)
    assert constants.half_size == pytest.approx(60, rel=0.1)


def test_attention_is_as_fast_as_forward_and_backward_were_together():
    row = AttentionRate(
        seq_len=64, heads=2, head_width=8, number_format="fp32", forward_flops_per_s=5e9, backward_flops_per_s=4e9
    )
    attention = constants_of(probed(attention=(row,))).attention
    flops = 1e9
    assert (1 + BACKWARD_ATTENTION) * flops / (attention * RATE) == pytest.approx(flops / 5e9 + 2 * flops / 4e9)


def gather(ranks: int, latency_s: float) -> CollectiveRate:
    return CollectiveRate(
        operation="all_gather",
        tier="node",
        ranks=ranks,
        groups=1,
        from_bytes=1024,
        latency_s=latency_s,
        bytes_per_s=1e9,
    )


def test_collectives_start_as_late_as_measured_in_groups_of_each_size():
    rows = tuple(gather(ranks, 3e-4 + 5e-5 * (ranks - 1)) for ranks in (2, 4, 8))
    constants = constants_of(probed(collectives=rows))
    assert (constants.latency, constants.hop) == (pytest.approx(3e-4), pytest.approx(5e-5))


def test_one_group_size_is_reproduced_too():
    constants = constants_of(probed(collectives=(gather(2, 4e-4),)))
    assert constants.latency + constants.hop == pytest.approx(4e-4)


def test_the_host_is_as_fast_as_measured():
    assert constants_of(probed(layer_host_s=2e-3)).host == 2e-3


def test_what_nobody_measured_is_less_sure():
    published, measured = time_std(Cluster.parse("8xh100"), experts=False), time_std(probed(), experts=False)
    assert published == fitted()[1].dense_time < measured < time_std(Cluster.parse("2xcpu"), experts=False)
    assert time_std(Cluster.parse("8xh100"), experts=True) == fitted()[1].moe_time


def test_memory_is_less_sure_on_cpus_and_as_sure_as_before_on_accelerators():
    assert memory_std(Cluster.parse("8xh100")) == fitted()[1].memory < memory_std(Cluster.parse("2xcpu"))


@pytest.mark.parametrize("state", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("plan", "copies"),
    [(Plan(), 3), (Plan(dp_replicate=2), 1.5), (Plan(dp_shard=2), 1.5), (Plan(dp_shard=2, zero=1), 1.5)],
    ids=str,
)
def test_a_cpu_s_memory_holds_the_copies_for_a_checkpoint(plan, copies, state):
    """Weights and both moments, in fp32, are copied by the ranks that hold them: second steps need that much more."""
    run = load("demo", {"model.vocab_size": 4096, "optimizer.state": state})
    found = CostModel.of(run, Cluster.parse("2xcpu")).predict_memory(Layouts.of([plan])).workspace[0]
    weights = predict(Plan(), run, Cluster.parse("1xcpu")).memory["weights"]
    known = constants_of(Cluster.parse("2xcpu")).workspace_bytes
    assert found - known == pytest.approx(copies * weights, rel=0.01)


@pytest.mark.parametrize("measured_mb", [335, 383, 395])
def test_the_demo_s_measured_memory_is_in_its_interval(measured_mb):
    """From 4 steps to 20, with evaluations and checkpoints; two processes on two cores, on three days."""
    run = load("demo", {"model.vocab_size": 4096})
    plan = Plan(dp_replicate=2, microbatch=4, precision="bf16")
    expected = predict(plan, run, Cluster.parse("2xcpu")).memory_bytes
    assert expected.low < measured_mb * 1e6 < expected.high < 2 * expected.low
