"""What stopped a run, by component, beside what published fleets let expect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from argosy.plan.cost.reliability import FailureRates
from argosy.plan.hardware.clusters import Cluster
from argosy.watch.rules.planner import Planner
from argosy.watch.rules.stops import component_of, failures, stops_so_far
from watched import BEGAN_S, H100, big_run, columns, event, healthy, start

PLAN = "dp_shard=64,zero=1,recompute=selective,microbatch=1,precision=bf16,bucket_mb=64"


def stopped(*stops: tuple[float, list[str], list[str]]) -> Any:
    """A run of 64 H100 with these stops: seconds after its beginning, what processes said, other events."""
    events = []
    for at_s, said, others in stops:
        events += [event(kind, at_s - 1, "coordinator", why="", node="node0") for kind in others]
        events += [
            event("worker_died", at_s + i / 100, "launcher-node0", rank=i, exit_code=1, why=why, step=int(at_s))
            for i, why in enumerate(said)
        ]
        events += [event("break", at_s + 0.5, "coordinator", why="a rank is lost")]
        events += [event("recovered", at_s + 4, step=int(at_s), source="disk", steps_lost=1, seconds=0.1)]
        events += [start(int(at_s), BEGAN_S + at_s + 5, H100)]
    return healthy(big_run(), PLAN, hardware=H100, steps=columns(400, step_s=8.0), events=events)


@pytest.mark.parametrize(
    ("said", "events", "component"),
    [
        (["exit code 1, AcceleratorError: CUDA error: uncorrectable ECC error encountered"], [], "hbm"),
        (["exit code 1, RuntimeError: NVLink error: link 3 (Xid 74)"], [], "nvlink"),
        (["exit code 1, RuntimeError: GPU has fallen off the bus"], [], "gpu"),
        (["exit code 1, NCCL error: mlx5_0: Got completion with error 12"], [], "nic"),
        (["exit code 1, DistBackendError: NCCL communicator timeout"], [], "network"),
        (["exit code 1, OSError: [Errno 28] No space left on device"], [], "storage"),
        (["exit code 1, KeyError: 'tokens'"], [], "software"),
        (["signal SIGSEGV"], [], "software"),
        (["signal SIGBUS"], [], "dram"),
        (["signal SIGKILL"], [], None),
        (["signal SIGKILL"], ["oom_kill"], "software"),
        ([], ["agent_left"], "host"),
        ([], ["gradient_corrupt"], "corruption"),
        ([], ["disk_failed"], "storage"),
        ([], [], None),
        # A rank that dies takes the connections of others with it.
        (["exit code 1, RuntimeError: Connection closed by peer", "signal SIGSEGV"], [], "software"),
        # A machine that leaves is what is seen of a board that fails, if nobody said more.
        (["exit code 1, RuntimeError: Xid 79"], ["agent_left"], "gpu"),
    ],
)
def test_the_component_of_a_stop_is_told_by_its_events(said, events, component):
    facts = stopped((400.0, said, events))
    (outage,) = failures(facts)
    assert component_of(facts, outage) == component


def test_expected_and_seen_stops_stand_side_by_side():
    ecc = ["exit code 1, AcceleratorError: CUDA error: uncorrectable ECC error encountered"]
    facts = stopped((400.0, ecc, []), (900.0, ecc, []), (1500.0, ["signal SIGKILL"], []))
    found = stops_so_far(facts, Planner(facts))
    assert found is not None and (found.seen, found.unexplained) == (3, 1)
    of = {each.component: each for each in found.components}
    assert of["hbm"].seen == 2 and of["gpu"].seen == 0
    assert found.device_hours == pytest.approx(64 * facts.wall_s / 3600)
    by_catalogue = FailureRates.of(Cluster.parse("64xh100")).rate.mid * found.device_hours
    assert found.expected[1] == pytest.approx(by_catalogue, rel=0.01)
    assert "HBM: more than expected" in found.words and "by the run's own stops" in found.words
    assert float(found.mtbf_s.mid) == pytest.approx(facts.wall_s / 3, rel=0.5), "three stops decide it"


def test_a_run_without_stops_goes_by_the_catalogue():
    facts = stopped()
    found = stops_so_far(facts, Planner(facts))
    assert found is not None and found.seen == 0 and all(each.seen == 0 for each in found.components)
    assert "own stops" not in found.words


def test_time_before_a_resize_counts_for_the_devices_that_the_run_had_then():
    few = replace(H100, processes=8)
    resize = [event("break", 1600.0, "coordinator", why="nodes left"), start(200, BEGAN_S + 1600, few)]
    facts = healthy(big_run(), "dp_shard=8", hardware=H100, steps=columns(400, step_s=8.0), events=resize)
    found = stops_so_far(facts, Planner(facts))
    assert found is not None and found.device_hours == pytest.approx((64 + 8) * 1600 / 3600, rel=0.01)
