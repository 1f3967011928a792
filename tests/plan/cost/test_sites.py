"""Two sites: what they send, by hand; H = 1 is synchronous; more inner steps cost less. And updates of asynchronous
workers: bytes and seconds, by hand; what keeps a run from making more of them."""

from __future__ import annotations

import numpy as np
import pytest

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.config.sync import SiteConfig
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.network import FRAMING
from argosy.plan.cost.prediction import predict
from argosy.plan.cost.sites import (
    EXCHANGE_BYTE_S,
    EXCHANGE_NUMBER_S,
    RANKS_NUMBER_S,
    UPDATE_MESSAGES,
    added_s,
    bytes_of_step,
    exchange_bytes,
    exchange_s,
    outer_exchanges,
    round_bytes,
    round_s,
    rounds_of,
    sent_bytes,
    updates_in_words,
    updates_of,
    with_workers,
    within_site,
)
from argosy.plan.hardware.clusters import Cluster, NodeGroup, SiteLink
from argosy.plan.hardware.devices import find_device
from argosy.plan.parameters import parameters
from argosy.plan.plan import Plan
from argosy.plan.report.report import PlanRequest, plan_report

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


# ---- workers of parameter servers ----


def asynchronous(workers=2, **sync):
    keys = {"model.preset": "llama3-8b", "train.global_batch": 128, "data.seq_len": 8192, "plan": "auto,sync=async"}
    run = load(None, keys)
    sites = tuple(SiteConfig(name=f"w{number}") for number in range(workers))
    return run.model_copy(update={"sites": sites, "sync": run.sync.model_copy(update=sync)})


def test_a_worker_sends_all_numbers_as_the_wire_has_them_and_receives_them_in_fp32():
    run = asynchronous()
    numbers = parameters(run.model)
    assert updates_of(run, TWO, 1.0).received_bytes == 4 * numbers
    assert sent_bytes(run) == pytest.approx(4 * numbers, rel=1e-6)
    assert sent_bytes(asynchronous(wire="int8", shards=3)) == pytest.approx((1 + 4 / 256) * numbers, rel=1e-6)


def test_the_worker_behind_the_link_takes_its_time_longer():
    run = asynchronous(max_staleness=1000)
    found, link = updates_of(run, TWO, 7.0), TWO.links[0]
    near, away = found.worker_s
    assert found.is_away == (False, True)
    on_link = FRAMING * 8 * parameters(run.model) / link.bandwidth_bytes_per_s + 2 * UPDATE_MESSAGES * link.latency_s
    assert away - near == pytest.approx(on_link, rel=1e-6)
    several = updates_of(asynchronous(max_staleness=1000, local_steps=10), TWO, 7.0).worker_s
    assert [ten - one for ten, one in zip(several, found.worker_s, strict=True)] == pytest.approx([63.0, 63.0])


@pytest.mark.parametrize(
    ("sync", "workers", "step_s", "limit"),
    [
        ({"max_staleness": 100_000}, 2, 1e5, "workers"),
        ({"max_staleness": 100_000}, 400, 1e3, "a server"),
        ({"max_staleness": 100_000, "shards": 1000}, 400, 100.0, "the link"),
        ({"max_staleness": 1}, 3, 1e5, "max_staleness"),
        ({"max_staleness": 0}, 2, 1e5, "max_staleness"),
    ],
)
def test_what_is_busiest_sets_the_pace(sync, workers, step_s, limit):
    found = updates_of(asynchronous(workers, **sync), TWO, step_s)
    assert found.limit == limit
    assert found.interval_s == max(found.limits.values())
    assert found.interval_s >= 1 / sum(1 / seconds for seconds in found.worker_s) * (1 - 1e-9)


def test_workers_that_are_alike_and_far_from_any_limit_share_the_steps():
    run = asynchronous(max_staleness=1000, local_steps=500)
    assert added_s(run, TWO, 1e4) == pytest.approx(0.0, abs=20.0)
    steps = np.array([10.0, 20.0])
    both = added_s(run, TWO, steps)
    assert both[1] == pytest.approx(added_s(run, TWO, 20.0))


def test_a_place_is_dealt_out_to_its_workers():
    parts = with_workers(Cluster.parse("4x8xh100"), asynchronous())
    assert parts.sites == {"w0": 16, "w1": 16}
    assert len(parts.links) == 1
    assert with_workers(Cluster.parse("8xh100"), asynchronous(4)).sites == {f"w{n}": 2 for n in range(4)}
    assert with_workers(TWO, asynchronous()) is TWO
    with pytest.raises(UserError, match="cannot share"):
        with_workers(Cluster.parse("8xh100"), asynchronous(3))
    with pytest.raises(UserError, match="has 2 sites"):
        with_workers(TWO, asynchronous(3))


def test_the_planner_predicts_updates_and_each_worker_computes_whole_batches():
    run = asynchronous(local_steps=4, wire="int8")
    assert within_site(CostModel.of(run, TWO), TWO).run.train.global_batch == 128
    report = plan_report(PlanRequest(run, TWO))
    (words,) = [note for note in report.notes if "without waiting" in note]
    beside = ("sites", "evaluations", "failures")
    inside_s = sum(value for name, value in report.explanation.waterfall.items() if name not in beside)
    assert words == updates_in_words(run, TWO, inside_s)
    found, choice = updates_of(run, TWO, inside_s), report.explanation.choice
    assert choice.tokens_per_s == pytest.approx(4 * run.tokens_per_step / found.interval_s, rel=1e-6)
    assert choice.devices == TWO.devices
    assert not report.exchanges
    costs = within_site(CostModel.of(run, TWO), TWO)
    assert exchange_s(costs, TWO, inside_s) == pytest.approx(report.explanation.waterfall["sites"])


def test_a_worker_predicts_its_update_in_plan_toml(tmp_path):
    run = asynchronous(max_staleness=1000).model_copy(update={"site": "w1"})
    plan = Plan.parse("dp_shard=64,sync=async")
    here = TWO.model_copy(update={"groups": TWO.groups[:1], "links": ()})
    made = predict(plan, run, here)
    assert made.update["sent_bytes"] == sent_bytes(run) == made.traffic["sites"]
    assert made.update["seconds"] == pytest.approx(sum(made.seconds.values()))
    path = tmp_path / "plan.toml"
    path.write_text(made.toml())
    assert type(made).load(path).update == pytest.approx(made.update, rel=1e-5)
    several = predict(plan, run.model_copy(update={"sync": run.sync.model_copy(update={"local_steps": 9})}), here)
    assert "sites" not in several.seconds
    assert several.update["seconds"] == pytest.approx(made.update["seconds"] + 8 * float(several.step_s.mid))
