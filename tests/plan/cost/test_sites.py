"""Two sites: what they send, by hand; H = 1 is synchronous; more inner steps cost less."""

from __future__ import annotations

import pytest

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.sites import (
    EXCHANGE_BYTE_S,
    EXCHANGE_NUMBER_S,
    RANKS_NUMBER_S,
    bytes_of_step,
    exchange_bytes,
    exchange_s,
    outer_exchanges,
    round_bytes,
    round_s,
    rounds_of,
    within_site,
)
from argosy.plan.hardware.clusters import Cluster, NodeGroup, SiteLink
from argosy.plan.hardware.devices import find_device
from argosy.plan.plan import Plan
from argosy.plan.workload import parameters

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
    assert exchange_s(costs, TWO) == pytest.approx(round_s(costs, TWO) / 20)
    in_turn = run.model_copy(update={"sync": sync.model_copy(update={"fragments": 4, "overlap_steps": 2})})
    streamed = CostModel.of(in_turn, TWO)
    assert round_bytes(streamed, TWO) == round_bytes(costs, TWO) / 4
    hidden = [rounds_of(streamed, TWO, step_s) for step_s in (0.0, round_s(streamed, TWO) / 4, 1e3)]
    waits = [float(each.waits_s) / each.seconds for each in hidden]
    in_ranks = hidden[0].seconds * waits[2]
    assert waits[:2] == pytest.approx([1.0, 0.5]), "nothing hides without steps"
    assert in_ranks == pytest.approx(RANKS_NUMBER_S * costs.workload.matrix_parameters / 4)
    whole = exchange_bytes(costs, TWO) / TWO.links[0].bandwidth_bytes_per_s
    assert round_s(costs, TWO) > whole * (1 + 4 / 256) / 4


def test_the_last_round_is_about_all_weights_and_nothing_hides_it() -> None:
    streamed = asked(steps=100, every_steps=20, fragments=4, overlap_steps=2, wire="int8")
    costs = CostModel.of(streamed, TWO)
    found = rounds_of(costs, TWO, 1e3)
    whole = costs.on(asked(steps=100, every_steps=20, wire="int8"), costs.devices)
    assert (found.rounds, found.last_s) == (20, round_s(whole, TWO))
    assert exchange_s(costs, TWO, 1e3) == pytest.approx((19 * float(found.waits_s) + found.last_s) / 100)
    endless = rounds_of(costs.on(asked(steps=0, **dict(streamed.sync)), costs.devices), TWO, 1e3)
    assert endless.step_s == float(endless.waits_s) / 5


def test_the_exchange_takes_its_time_from_steps_that_the_same_cores_make() -> None:
    groups = tuple(NodeGroup(device=find_device("cpu"), nodes=1, site=name) for name in ("a", "b"))
    link = SiteLink(sites=("a", "b"), bandwidth_bytes_per_s=1e9, latency_s=1e-3)
    place = Cluster(name="cpus", groups=groups, links=(link,))
    costs = CostModel.of(asked(steps=0, every_steps=20, fragments=2, overlap_steps=5), place)
    found = rounds_of(costs, place, 1e3)
    of_number = RANKS_NUMBER_S + EXCHANGE_NUMBER_S + 4 * EXCHANGE_BYTE_S  # of two sites, each sends all numbers
    assert float(found.waits_s) + found.slows_s == pytest.approx(of_number * costs.workload.matrix_parameters / 2)
    assert rounds_of(costs.on(asked(steps=0, every_steps=20, fragments=2), costs.devices), place, 1e3).slows_s == 0.0


def test_sums_before_local_steps_are_waited_for_in_full_and_sent_in_fp32() -> None:
    later = asked(steps=100, from_step=40, every_steps=20, wire="int8")
    costs = CostModel.of(later, TWO)
    found = rounds_of(costs, TWO, 3.0)
    exact = costs.on(asked(steps=100, every_steps=1, wire="fp32"), costs.devices)
    assert (found.sums, found.rounds, found.sum_s) == (40, 3, round_s(exact, TWO))
    assert exchange_s(costs, TWO, 3.0) == pytest.approx((40 * found.sum_s + 3 * found.seconds) / 100)
    only = rounds_of(costs.on(asked(steps=30, from_step=40), costs.devices), TWO, 3.0)
    assert (only.rounds, only.step_s) == (0, only.sum_s)
    numbers = parameters(RUN.model)
    assert bytes_of_step(later) == pytest.approx((40 * 4 + 3 * (1 + 4 / 256)) * numbers / 100)
    assert bytes_of_step(asked(steps=0, every_steps=20)) == pytest.approx(4 * numbers / 20)


def asked(steps: int, **sync: object) -> RunConfig:
    run = RUN.model_copy(update={"sites": ("east", "west"), "sync": RUN.sync.model_copy(update=sync)})
    return run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})})


def test_a_site_has_its_share_of_batch_and_devices() -> None:
    part = within_site(CostModel.of(RUN, TWO), TWO)
    assert (part.devices, part.run.train.global_batch) == (64, 64)


def test_a_batch_that_sites_cannot_share_is_refused() -> None:
    odd = RUN.model_copy(update={"train": RUN.train.model_copy(update={"global_batch": 127})})
    with pytest.raises(UserError, match="Try 126"):
        within_site(CostModel.of(odd, TWO), TWO)
