"""A timeline puts each operation where its rates and what it waits for leave it."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
import torch

from argosy.plan.cost.rates import Rates
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.topology import Topology
from argosy.simulate.record import Change, Event, MemoryBlock, Operation, SendEvent, StepPlace, Trace, WaitEvent
from argosy.simulate.timeline import COMPUTE, Durations, StepTimeline, chrome_trace, draw

CLUSTER = Cluster.parse("16xh100")
HERE = StepPlace("forward", 0)
MATMUL = Operation("aten.mm", 10**12, 10**6, torch.bfloat16, HERE)


def all_gather(axis: str = "shard", stride: int = 1, kind: str = "all_gather") -> SendEvent:
    return SendEvent(kind, axis, 8, 7 * 2**25, 2**28, stride, None, HERE)


def send(to: int, kind: str = "send") -> SendEvent:
    return SendEvent(kind, "pp", 2, 2**24, 2**24, 1, to, HERE)


def alone(*events: Event) -> StepTimeline:
    return draw({0: Trace(Counter(), list(events))}, CLUSTER)[0]


def test_the_roofline_is_arithmetic_or_memory_whichever_takes_longer():
    durations, device = Durations(CLUSTER), CLUSTER.device
    assert durations.of_work(MATMUL) == pytest.approx(1e12 / device.matmul_flops_per_s("bf16"))
    copy = MATMUL._replace(flops=0, moved_bytes=10**9)
    assert durations.of_work(copy) == pytest.approx(1e9 / device.memory_bytes_per_s)
    assert durations.of_work(MATMUL._replace(dtype=torch.float32)) > durations.of_work(MATMUL)


def test_messages_take_longer_where_they_cross_nodes_and_where_they_go_round_twice():
    durations = Durations(CLUSTER)
    assert durations.of_message(all_gather(stride=2)) > durations.of_message(all_gather())
    across = all_gather(stride=2)
    twice = durations.of_message(across._replace(kind="all_reduce")) / durations.of_message(across)
    assert twice == pytest.approx(2, rel=0.1)


def test_a_message_hides_behind_work_until_its_result_is_needed():
    message, work = Durations(CLUSTER).of_message(all_gather()), Durations(CLUSTER).of_work(MATMUL)
    hidden = alone(all_gather(), *[MATMUL] * 10, WaitEvent(0, HERE), MATMUL)
    assert hidden.step_s == pytest.approx(11 * work) and not hidden.waited_s
    exposed = alone(all_gather(), WaitEvent(0, HERE), MATMUL)
    assert exposed.waited_s == {"shard": pytest.approx(message)}
    assert exposed.step_s == pytest.approx(message + work)


def test_what_follows_a_message_beside_the_computation_delays_only_who_waits_for_it():
    message, work = Durations(CLUSTER).of_message(all_gather()), Durations(CLUSTER).of_work(MATMUL)
    follows = MATMUL._replace(after=0)
    unseen = alone(all_gather(), follows, *[MATMUL] * 10)
    assert unseen.compute_s == pytest.approx(10 * work) and not unseen.waited_s
    seen = alone(all_gather(), follows, WaitEvent(0, HERE))
    assert seen.step_s == pytest.approx(message + work) and seen.compute_s == 0
    second = alone(all_gather(), all_gather(axis="replicate")._replace(after=0))
    assert second.step_s == pytest.approx(2 * message)


def test_messages_of_one_axis_queue_and_those_of_two_do_not():
    message = Durations(CLUSTER).of_message(all_gather())
    assert alone(all_gather(), all_gather()).step_s == pytest.approx(2 * message)
    assert alone(all_gather(), all_gather(axis="tp")).step_s == pytest.approx(message)


def test_messages_of_two_axes_queue_where_they_pass_one_wire():
    cluster = CLUSTER.changed(topology=Topology(kind="rail-only"))
    fabric = Rates.of(cluster).fabric
    leaving, inside = all_gather(stride=2), all_gather(axis="tp")
    durations = Durations(cluster, fabric)
    assert durations.wires_of(leaving) == durations.wires_of(leaving._replace(axis="cp")) != durations.wires_of(inside)

    def step_s(*events: Event) -> float:
        return draw({0: Trace(Counter(), list(events))}, cluster, fabric)[0].step_s

    message = durations.of_message(leaving)
    assert step_s(leaving, leaving._replace(axis="cp")) == pytest.approx(2 * message)
    assert step_s(leaving, inside) == pytest.approx(message)


def test_a_rank_waits_for_what_another_has_not_sent_yet():
    first = Trace(Counter(), [MATMUL, send(1), send(1, "recv"), WaitEvent(0, HERE)])
    second = Trace(Counter(), [send(0, "recv"), WaitEvent(0, HERE), MATMUL, send(0)])
    both = draw({0: first, 1: second}, CLUSTER)
    work, message = Durations(CLUSTER).of_work(MATMUL), Durations(CLUSTER).of_message(send(1))
    assert both[1].waited_s["pp"] == pytest.approx(work + message)
    assert both[0].step_s == both[1].step_s == pytest.approx(2 * (work + message))
    alone = draw({1: second}, CLUSTER)[1]
    assert alone.waited_s["pp"] == pytest.approx(message), "the other is taken to be as far"


def test_a_collective_of_two_ranks_begins_when_the_later_one_has_begun_it():
    message, work = Durations(CLUSTER).of_message(all_gather()), Durations(CLUSTER).of_work(MATMUL)
    early, late = [all_gather(), WaitEvent(0, HERE)], [MATMUL, all_gather(), WaitEvent(0, HERE)]
    drawn = draw({rank: Trace(Counter(), early if rank == 0 else late) for rank in (0, 1, 8)}, CLUSTER)
    assert drawn[0].step_s == drawn[1].step_s == drawn[8].step_s == pytest.approx(work + message)
    assert drawn[0].waited_s == {"shard": pytest.approx(work + message)}, "rank 8 is in another group"


def test_the_trace_file_has_a_track_for_the_device_and_each_axis():
    grown = Change(2**20, MemoryBlock(), HERE)
    trace = chrome_trace({3: alone(grown, MATMUL, all_gather(), WaitEvent(0, HERE), MATMUL)})
    events = json.loads(trace)["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], tracks[e["tid"]]) for e in spans] == [
        ("mm", COMPUTE),
        ("all_gather shard", "shard"),
        ("mm", COMPUTE),
    ]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 0.002 for a, b in pairwise(spans))
    assert {e["pid"] for e in events} == {3}
    assert next(e for e in events if e["ph"] == "C")["args"] == {"other": 2**20}
