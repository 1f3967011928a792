"""Two sites: what they send, by hand; H = 1 is synchronous; more inner steps cost less."""

from __future__ import annotations

import pytest

from argosy.config.load import load
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.sites import exchange_bytes, exchange_s, outer_exchanges, round_bytes, round_s, within_site
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Plan

TWO = Cluster.parse("two-sites")
RUN = load(None, {"model.preset": "llama3-8b", "train.global_batch": 128, "data.seq_len": 8192})


def test_each_of_two_sites_sends_all_gradients_once() -> None:
    costs = CostModel.of(RUN, TWO)
    link = TWO.links[0]
    assert exchange_bytes(costs, TWO) == 4 * costs.workload.matrix_parameters
    assert exchange_s(costs, TWO) == pytest.approx(
        4 * costs.workload.matrix_parameters / link.bandwidth_bytes_per_s + 2 * link.latency_s
    )


def test_one_place_exchanges_nothing() -> None:
    cluster = Cluster.parse("16xh100")
    assert exchange_s(CostModel.of(RUN, cluster), cluster) == 0


def test_local_steps_divide_the_bytes_and_tend_to_the_step_of_a_site() -> None:
    costs = CostModel.of(RUN, TWO)
    ways = outer_exchanges(costs, TWO, Plan(dp_shard=64), 3.0)
    assert [way.inner_steps for way in ways] == [10, 50, 100, 500]
    assert ways[0].bytes_per_step == pytest.approx(exchange_bytes(costs, TWO) / 10)
    assert ways[0].step_s == pytest.approx(3.0 + round_s(costs, TWO) / 10)
    assert 3.0 < ways[-1].step_s < 4.0
    assert ways[0].sync == {"every_steps": 10, "wire": "fp32"}
    assert Plan.parse(ways[0].plan) == Plan(dp_shard=64, sync="diloco")


def test_a_run_with_sites_agrees_now_and_then_in_the_numbers_of_its_wire() -> None:
    sync = RUN.sync.model_copy(update={"every_steps": 20, "wire": "int8"})
    run = RUN.model_copy(update={"sync": sync, "sites": ("east", "west")})  # only that there are some counts here
    costs = CostModel.of(run, TWO)
    assert round_bytes(costs, TWO) == pytest.approx((1 + 4 / 256) * costs.workload.matrix_parameters)
    assert exchange_s(costs, TWO) == round_s(costs, TWO) / 20
    in_turn = run.model_copy(update={"sync": sync.model_copy(update={"fragments": 4, "overlap_steps": 2})})
    streamed = CostModel.of(in_turn, TWO)
    assert round_bytes(streamed, TWO) == round_bytes(costs, TWO) / 4
    assert exchange_s(streamed, TWO) == 4 * round_s(streamed, TWO) / 20, "nothing hides without steps"
    assert exchange_s(streamed, TWO, round_s(streamed, TWO) / 4) == pytest.approx(2 * round_s(streamed, TWO) / 20)
    assert exchange_s(streamed, TWO, 1e3) == 0.0
    whole = exchange_bytes(costs, TWO) / TWO.links[0].bandwidth_bytes_per_s
    assert round_s(costs, TWO) > whole * (1 + 4 / 256) / 4


def test_a_site_has_its_share_of_batch_and_devices() -> None:
    part = within_site(CostModel.of(RUN, TWO), TWO)
    assert (part.devices, part.run.train.global_batch) == (64, 64)


def test_a_batch_that_sites_cannot_share_is_refused() -> None:
    odd = RUN.model_copy(update={"train": RUN.train.model_copy(update={"global_batch": 127})})
    with pytest.raises(UserError, match="Try 126"):
        within_site(CostModel.of(odd, TWO), TWO)
