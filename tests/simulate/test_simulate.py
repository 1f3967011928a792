"""A simulation's answer: its parts add up, and what cannot be simulated is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.plan.cost.traffic import traffic
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Plan
from argosy.simulate.simulate import ranks_of_stages, settle, simulate
from tiny import run_config

CLUSTER = Cluster.parse("8xh100")


def test_the_stages_of_a_pipeline_are_simulated_together():
    plan, run = Plan.parse("pp=2,microbatch=4"), run_config(Path("no data"))
    found = simulate(plan, run, ranks_of_stages(plan, 0), CLUSTER)
    assert [one.rank for one in found] == [0, 1]
    for one in found:
        assert sum(one.peak.values()) == one.peak_bytes > one.held_bytes
        assert one.sent_bytes == traffic(plan, run, one.rank)
        assert one.timeline.compute_s + sum(one.timeline.waited_s.values()) <= one.timeline.step_s * (1 + 1e-9)
        assert one.record().memory.peak_bytes == one.peak_bytes
    # The last stage has nothing to do until the first has sent; the first, nothing until gradients come back.
    first, last = ([span for span in one.timeline.spans if span.where.layer is not None] for one in found)
    assert last[0].start_s > next(s for s in first if s.where.phase == "forward").start_s
    back = next(span for span in first if span.where.phase == "backward")
    assert back.start_s > next(span for span in last if span.where.phase == "backward").start_s
    assert all(one.timeline.waited_s["pp"] > 0 for one in found)


@pytest.mark.slow
def test_ranks_simulated_at_once_are_those_simulated_one_after_the_other():
    plan, run = Plan.parse("pp=2,microbatch=4"), run_config(Path("no data"))
    alone, together = (simulate(plan, run, [0, 1], CLUSTER, processes=n) for n in (1, 2))
    of_one, of_both = ([replace(one.record(), tracing_s=0.0) for one in each] for each in (alone, together))
    assert of_one == of_both


def test_ranks_of_stages_stand_at_the_same_place():
    assert ranks_of_stages(Plan.parse("pp=4,dp_shard=2,tp=2"), 6) == [2, 6, 10, 14]
    assert ranks_of_stages(Plan.parse("dp_shard=4"), 3) == [3]


def test_what_offload_keeps_on_the_host_is_not_the_device_s():
    run = run_config(Path("no data"))
    on_device, on_host = (
        simulate(Plan.parse(f"microbatch=8,offload={where}"), run, [0], CLUSTER)[0] for where in ("none", "optimizer")
    )
    assert "optimizer" not in on_host.peak and on_device.peak["optimizer"] > 0
    assert on_host.host_bytes >= on_device.peak["optimizer"]
    assert on_host.held_bytes == on_device.held_bytes - on_device.peak["optimizer"]


@pytest.mark.parametrize(
    "keys, world_size, said",
    [
        ({"plan": "dp_shard=2"}, 4, "--world-size 2"),
        ({"plan": "tp=8"}, None, "plan.tp = 8"),
        ({"plan": "dp_shards=2"}, None, "did you mean dp_shard"),
        ({"plan": "dp_shard=2", "model": {"vocab_size": 0}, "data": {"sources": {}}}, None, "vocab_size"),
    ],
)
def test_a_plan_that_cannot_train_the_run_is_refused(keys, world_size, said):
    with pytest.raises(UserError, match=said):
        settle(
            run_config(Path("no data"), **{k: v for k, v in keys.items() if k != "plan"}).model_copy(
                update={"plan": keys["plan"]}
            ),
            world_size,
        )


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="ranks 0 to 1"):
        simulate(Plan.parse("dp_shard=2"), run_config(Path("no data")), [2], CLUSTER)
