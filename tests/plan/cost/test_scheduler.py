"""The simulated scheduler agrees with closed forms where there are some."""

from __future__ import annotations

import math

import pytest

from argosy.config.load import load
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.inference import ReplicaCut, ServingModel, formats_of
from argosy.plan.cost.scheduler import SimulatedReplica
from argosy.plan.cost.serving_constants import ServingConstants
from argosy.plan.hardware.clusters import Cluster


@pytest.fixture(scope="module")
def model() -> ServingModel:
    run = load(None, {"model.preset": "llama3-8b", "data.seq_len": 4096, "train.global_batch": 8})
    machines = Cluster.parse("1xh100")
    costs = CostModel.of(run, machines)
    formats = formats_of(machines.device, costs.rates, "bf16", "16")
    return ServingModel(costs.workload, costs.rates, ReplicaCut(1), formats, ServingConstants())


def test_requests_that_come_seldom_wait_for_nothing(model: ServingModel) -> None:
    found = SimulatedReplica(model, 1024, 256).simulate(0.01)
    for output in (8, 256):
        tpot_s = SimulatedReplica(model, 1024, output).simulate(0.01).tpot_p50_s
        assert tpot_s == pytest.approx(float(model.decode_s(1, 1024 + output / 2)), rel=0.02)
    alone = float(model.prefill_s(1, 1024)) + model.constants.request_s
    assert found.ttft_p50_s == pytest.approx(alone, rel=0.2)  # lengths vary


def test_more_requests_make_all_latencies_longer(model: ServingModel) -> None:
    replica = SimulatedReplica(model, 1024, 256)
    found = [replica.simulate(share * replica.most_per_s) for share in (0.2, 0.6, 0.95)]
    assert sorted(each.tpot_p95_s for each in found) == [each.tpot_p95_s for each in found]
    assert sorted(each.ttft_p95_s for each in found) == [each.ttft_p95_s for each in found]
    assert all(each.ttft_p50_s <= each.ttft_p95_s and each.tpot_p50_s <= each.tpot_p95_s for each in found)


def test_the_most_requests_keep_the_limits_and_a_few_more_do_not(model: ServingModel) -> None:
    replica = SimulatedReplica(model, 1024, 256)
    most = replica.most_within(0.5, 0.02)
    assert 0 < most < replica.most_per_s
    assert replica.simulate(most).tpot_p95_s <= 0.02
    worse = replica.simulate(1.1 * most)
    assert worse.tpot_p95_s > 0.02 or worse.ttft_p95_s > 0.5


def test_a_limit_below_one_request_alone_holds_at_no_rate(model: ServingModel) -> None:
    assert SimulatedReplica(model, 1024, 256).most_within(math.inf, 1e-4) == 0


def test_prompts_computed_elsewhere_do_not_pause_answers(model: ServingModel) -> None:
    together, apart = (SimulatedReplica(model, 4096, 128, decodes_only=alone) for alone in (False, True))
    rate = 0.7 * together.most_per_s
    assert apart.simulate(rate).tpot_p95_s < together.simulate(rate).tpot_p95_s
    assert apart.most_per_s > together.most_per_s
