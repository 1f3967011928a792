"""Updates of asynchronous workers: bytes and seconds, by hand; and what keeps a run from making more of them."""

from __future__ import annotations

import numpy as np
import pytest

from argosy.config.load import load
from argosy.config.sync import SiteConfig
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.network import FRAMING
from argosy.plan.cost.prediction import predict
from argosy.plan.cost.sites import exchange_s, within_site
from argosy.plan.cost.updates import MESSAGES, added_s, in_words, sent_bytes, updates_of, with_workers
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Plan
from argosy.plan.report.report import PlanRequest, plan_report
from argosy.plan.workload import parameters

TWO = Cluster.parse("two-sites")


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
    on_link = FRAMING * 8 * parameters(run.model) / link.bandwidth_bytes_per_s + 2 * MESSAGES * link.latency_s
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
    inside_s = sum(value for name, value in report.explanation.waterfall.items() if name not in ("sites", "failures"))
    assert words == in_words(run, TWO, inside_s)
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
