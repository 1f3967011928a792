"""What is written down of a step: whose memory comes and goes, what is computed, in which phase and layer."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

from argosy.models.microbatch import microbatches
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.simulate.record import Change, ForwardBegins, Operation, Recorder, SendEvent, StepPlace, Trace, WaitEvent
from tiny import EAGER, MODEL, train_step
from workers import WorkerPool

ROWS = np.random.default_rng(0).integers(1, 400, (8, 33)).astype(np.int32)


def step_of(plan: Plan) -> Trace:
    """The second step of a single process: the first makes moments."""
    with Recorder() as recorder:
        step = train_step(World(), plan, recorder.clock)
        recorder.label([piece.value for piece in step.state.model.pieces], "parameters")
        batch = microbatches(ROWS, plan.microbatch, 0, torch.device("cpu"))
        for _ in range(2):
            recorder.begin({})
            step.apply(step.update(step.exchange(step.forward_backward(batch)), learning_rate=1e-2))
            trace = recorder.end()
        return trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return step_of(EAGER.model_copy(update={"microbatch": 4, "recompute": "full"}))


def test_memory_is_told_apart_by_what_it_is_for(trace: Trace):
    weights = sum(piece.value.nbytes for piece in train_step(World(), EAGER).state.model.pieces)
    assert trace.before["parameters"] == weights
    assert trace.before["optimizer"] == 2 * weights
    level = Counter(trace.before)
    most: Counter[str] = Counter()
    for event in trace.events:
        if isinstance(event, Change):
            level[event.memory.category] += event.bytes
            most |= Counter({event.memory.category: level[event.memory.category]})
    assert most["gradients"] >= weights and most["activations"] > 0
    for category in ("parameters", "optimizer", "activations", "gradients"):
        assert level[category] == trace.before[category], f"a step frees the {category} that it makes"


def test_every_layer_is_seen_forward_again_and_backward(trace: Trace):
    seen = {event.where for event in trace.events if isinstance(event, Operation)}
    for phase in ("forward", "recompute", "backward"):
        assert {where.layer for where in seen if where.phase == phase} >= set(range(MODEL["layers"]))
    assert {where.phase for where in seen if where.layer is None} >= {"forward", "backward", "optimizer"}
    assert str(StepPlace("backward", 1)) == "backward of layer 1"


def test_each_microbatch_s_forward_is_marked(trace: Trace):
    assert sum(isinstance(event, ForwardBegins) for event in trace.events) == len(ROWS) // 4


def test_an_operator_moves_what_it_reads_and_writes():
    table, x, rows = torch.ones(100, 8), torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)
    with Recorder() as recorder:
        recorder.begin({})
        torch.nn.functional.embedding(rows, table)  # 8 bytes a row's number, and the rows twice
        x.copy_(torch.ops.aten._unsafe_view(x, [4, 8]))
        torch._foreach_add_([x, x], 1.0)
        trace = recorder.end()
    moved = {event.name: event.moved_bytes for event in trace.events if isinstance(event, Operation)}
    assert moved == {"aten.embedding": 32 + 2 * 128, "aten.copy_": 2 * 128, "aten._foreach_add_": 4 * 128}


def test_work_has_its_arithmetic_its_traffic_and_its_dtype():
    x, weight = torch.ones(4, 8), torch.ones(8, 16, dtype=torch.float32)
    with Recorder() as recorder:
        x @ weight  # before the step
        recorder.begin({})
        with recorder.clock.time("optimizer"):
            y = (x @ weight).t()
        trace = recorder.end()
        y + y
    assert [event for event in trace.events if isinstance(event, Operation)] == [
        Operation("aten.mm", 2 * 4 * 8 * 16, 4 * (32 + 128 + 64), torch.float32, StepPlace("optimizer", None))
    ]


def test_a_label_goes_before_what_the_phase_tells():
    with Recorder() as recorder:
        recorder.begin({})
        with recorder.clock.time("optimizer"):
            mine, moments = torch.ones(8), torch.ones(4)
        recorder.label([mine[:2]], "host")
        trace = recorder.end()
    made = [(event.bytes, event.memory.category) for event in trace.events if isinstance(event, Change)]
    assert made == [(32, "host"), (16, "optimizer")]
    assert len(mine) + len(moments) == 12


def messages(world: World) -> list[tuple]:
    """What is written down of a sum that is waited for once it is needed, and of a pair of messages."""
    group = dist.group.WORLD
    with Recorder() as recorder:
        recorder.begin({group.group_name: "tp"})
        x = torch.ones(10)
        work = dist.all_reduce(x, async_op=True)
        torch.ones(3).add(1)
        work.wait()
        x.add(1)
        if world.rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(4), 0)
        trace = recorder.end()
    events = [event for event in trace.events if isinstance(event, SendEvent | WaitEvent)]
    return [
        (e.kind, e.axis, e.ranks, e.sent_bytes, e.message_bytes, e.peer) if isinstance(e, SendEvent) else e.messages_ago
        for e in events
    ]


def test_messages_have_their_axis_size_and_peer_and_are_waited_for_where_they_are_needed(workers: WorkerPool):
    sender, receiver = workers.run(2, messages)
    summed = [("all_reduce", "tp", 2, 40, 40, None), 0]
    assert sender == [*summed, ("send", "tp", 2, 16, 16, 1)]
    assert receiver == [*summed, ("recv", "tp", 2, 0, 16, 0)]
