"""A simulation's answer: its parts add up, and what cannot be simulated is refused."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy.errors import UserError
from argosy.models.microbatch import microbatches
from argosy.observe.wire import Counts
from argosy.parallel.world import World
from argosy.plan.cost.exact_state import state_bytes
from argosy.plan.cost.traffic import traffic
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Plan
from argosy.plan.workload import train_flops_per_token
from argosy.simulate.record import Change, LiveBytes, Operation, SendEvent, Trace, WaitEvent
from argosy.simulate.simulate import even_choice, ranks_of_stages, settle, simulate, simulate_rank, traced
from tiny import LATENT, LINEAR, eager, run_config, train_step
from wire_counter import WireCounter
from workers import WorkerPool

CLUSTER = Cluster.parse("8xh100")


def test_the_stages_of_a_pipeline_are_simulated_together():
    plan, run = Plan.parse("pp=2,microbatch=4"), run_config(Path("no data"))
    found = simulate(plan, run, ranks_of_stages(plan, 0), CLUSTER)
    assert [one.record.rank for one in found] == [0, 1]
    for one in found:
        memory = one.record.memory
        assert sum(memory.at_peak.values()) == memory.peak_bytes > memory.held_bytes
        sent = {(each.axis, each.collective): each.bytes for each in one.record.traffic}
        assert sent == traffic(plan, run, one.record.rank)
        assert one.timeline.compute_s + sum(one.timeline.waited_s.values()) <= one.timeline.step_s * (1 + 1e-9)
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
    of_one, of_both = ([replace(one.record, tracing_s=0.0) for one in each] for each in (alone, together))
    assert of_one == of_both


def test_ranks_of_stages_stand_at_the_same_place():
    assert ranks_of_stages(Plan.parse("pp=4,dp_shard=2,tp=2"), 6) == [2, 6, 10, 14]
    assert ranks_of_stages(Plan.parse("dp_shard=4"), 3) == [3]


def test_what_offload_keeps_on_the_host_is_not_the_device_s():
    run = run_config(Path("no data"))
    on_device, on_host = (
        simulate(Plan.parse(f"microbatch=8,offload={where}"), run, [0], CLUSTER)[0].record.memory
        for where in ("none", "optimizer")
    )
    assert "optimizer" not in on_host.at_peak and on_device.at_peak["optimizer"] > 0
    assert on_host.host_bytes >= on_device.at_peak["optimizer"]
    assert on_host.held_bytes == on_device.held_bytes - on_device.at_peak["optimizer"]


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


UNEVEN = {"layers": 4, "vocab_size": 403}  # rows that no number of ranks here divides
MODELS: dict[str, dict[str, Any]] = {
    "dense": UNEVEN,
    "tied": {**UNEVEN, "tie_embeddings": True, "attention_bias": True, "qk_norm": True, "kv_heads": 1},
    "experts": {
        **UNEVEN,
        "layers": 2,
        "moe": {"experts": 4, "expert_ffn_width": 16, "shared_experts": 1, "first_dense_layers": 1},
    },
    "latent": {**UNEVEN, **LATENT},
    "linear": {**UNEVEN, **LINEAR},
    "unlike": {
        **UNEVEN,
        "ffn_widths": [64, 96],
        "layer_scale": True,
        "attention": {
            "layers": ["chunked", "full"],
            "window": 9,
            "heads": [4, 8],
            "kv_heads": [2, 4],
            "head_widths": [8, 12],
            "keys_as_values": [False, True],
            "rotary_layers": [True, False],
            "temperature": 0.1,
        },
    },
}
QUICK = [
    ("dense", "dp_shard=2,zero=3,microbatch=2"),
    ("dense", "pp=2,microbatch=2"),
    ("experts", "dp_shard=2,ep=2,zero=1,microbatch=4"),
]
SLOW = [
    *(("dense", f"dp_shard=2,zero={stage}") for stage in range(4)),
    ("dense", "dp_shard=2,dp_replicate=2,zero=3,reduce=bf16,weights=bf16"),
    ("tied", "tp=2,microbatch=2"),
    ("dense", "tp=2,dp_shard=2,zero=3,precision=bf16"),
    ("dense", "cp=2,zero=0,microbatch=4"),
    ("dense", "cp=2,dp_shard=2"),
    ("dense", "cp=4,zero=0,microbatch=4,context=ulysses"),
    ("dense", "cp=2,tp=2,microbatch=4,recompute=full"),
    ("tied", "pp=2,schedule=gpipe"),
    ("dense", "pp=4"),
    ("dense", "pp=2,schedule=interleaved_1f1b"),
    ("dense", "pp=2,schedule=interleaved_zero_bubble"),
    ("dense", "pp=2,schedule=zbv"),
    ("dense", "pp=2,schedule=dualpipev"),
    ("dense", "pp=2,dp_shard=2,zero=3"),
    ("dense", "pp=2,dp_shard=2,zero=1"),
    ("dense", "tp=2,pp=2,recompute=full"),
    ("dense", "dp_shard=2,recompute=full"),
    ("dense", "dp_shard=2,recompute=selective,precision=bf16"),
    ("dense", "dp_shard=2,zero=2,offload=all,microbatch=2"),
    ("experts", "dp_shard=2,ep=2,zero=3"),
    ("experts", "dp_shard=2,ep=2,tp=2,zero=1"),
    ("experts", "dp_shard=2,ep=2,zero=1,microbatch=4,overlap_experts=true"),
    ("experts", "tp=2,precision=bf16"),
    ("tied", "tp=2,microbatch=2,async_tp=true"),
    ("experts", "tp=2,precision=bf16,recompute=full,async_tp=true"),
    ("latent", "tp=2,microbatch=2"),
    ("linear", "tp=2,microbatch=2"),
    ("linear", "cp=2,dp_shard=2,recompute=full"),
    ("linear", "recompute=selective,precision=bf16"),
    ("unlike", "tp=2,microbatch=2"),
    ("unlike", "cp=2,tp=2,microbatch=4,recompute=full"),
    ("unlike", "pp=2,dp_shard=2,zero=3"),
]
LAST, BOTH_ENDS = (-1,), (0, -1)
ENDS = {("dense", "tp=2,pp=2,recompute=full"): LAST}
"""Rank 0 may need most while gloo still holds a message that the next stage has not fetched."""
TABLE = [
    *(pytest.param(*row, LAST, id="-".join(row)) for row in QUICK),
    *(pytest.param(*row, ENDS.get(row, BOTH_ENDS), marks=pytest.mark.slow, id="-".join(row)) for row in SLOW),
]

Found = tuple[int, int, Counts, Counts]
"""The most bytes allocated in a step, those after it; bytes sent, messages."""


def really(world: World, plan: str, model_config: dict[str, Any]) -> Found:
    """The third step of a rank of gloo processes: the first two make what is kept."""
    layout, run = eager(plan), run_config(Path("no data"), model=model_config)
    with LiveBytes() as live:
        step = train_step(world, layout, model=model_config)
        model = step.state.model
        for moe in model.moes.values():
            moe.router.choose = partial(even_choice, run.model.moe.experts_per_token)  # type: ignore[method-assign]
        rows = np.ones((run.train.global_batch // layout.dp, run.data.seq_len + 1), dtype=np.int32)
        batch = microbatches(rows, layout.microbatch, 0, world.device)
        for _ in range(3):  # the second has moments to compare for the first time
            time.sleep(0.05)  # gloo's thread lets go of a message some time after it has arrived
            step.state.last_update = None  # its loads are the host's, which on a CPU is the same memory
            live.most, wire = live.now, WireCounter(model.meshes.axis_of_groups())
            with wire:
                step.apply(step.update(step.exchange(step.forward_backward(batch)), run.optimizer.lr))
        time.sleep(0.05)
        return live.most, live.now, wire.counts, wire.messages


def simulated(trace: Trace) -> Found:
    now = most = sum(trace.before.values())
    sent: Counts = Counter()
    messages: Counts = Counter()
    for event in trace.events:
        if isinstance(event, Change):
            now += event.bytes
            most = max(most, now)
        elif isinstance(event, SendEvent) and event.sent_bytes:
            sent[event.axis, event.kind] += event.sent_bytes
            messages[event.axis, event.kind] += 1
    return most, now, sent, messages


@pytest.mark.parametrize("model, plan, ranks", TABLE)
def test_a_simulated_rank_allocates_and_sends_what_a_real_one_does(
    workers: WorkerPool, model: str, plan: str, ranks: tuple[int, ...]
) -> None:
    config, layout = MODELS[model], eager(plan)
    found = workers.run(layout.world_size, really, plan, config)
    for rank in ranks:
        trace = simulate_rank(layout, run_config(Path("no data"), model=config), rank % layout.world_size)
        assert simulated(trace) == found[rank], f"rank {rank}"


@pytest.mark.parametrize(
    "model, plan, rank, optimizer",
    [
        ("dense", "tp=2,dp_shard=4,dp_replicate=2,zero=3,precision=bf16", 5, "muon"),
        pytest.param("experts", "dp_shard=8,ep=4,zero=1", 3, "adamw", marks=pytest.mark.slow),
        pytest.param("tied", "pp=2,tp=2,dp_shard=2,zero=2,microbatch=2", 6, "adamw", marks=pytest.mark.slow),
        pytest.param("linear", "tp=2,cp=2,microbatch=2", 3, "adamw", marks=pytest.mark.slow),
        pytest.param("linear", "cp=4,context=ulysses,recompute=full,microbatch=2", 3, "adamw", marks=pytest.mark.slow),
    ],
)
def test_it_holds_and_sends_what_the_formulas_say(model: str, plan: str, rank: int, optimizer: str) -> None:
    layout = Plan.parse(plan)
    few = {**MODELS[model], "layers": 2 * layout.pp}
    run = run_config(Path("no data"), model=few, optimizer={"kind": optimizer})
    trace = simulate_rank(layout, run, rank)
    state = state_bytes(layout, run, rank)
    assert (trace.before["parameters"], trace.before["optimizer"]) == (state.parameters, state.optimizer)
    expected, (_, _, sent, _) = traffic(layout, run, rank), simulated(trace)
    assert set(sent) == set(expected)
    for what, count in sent.items():
        assert count == pytest.approx(expected[what], rel=0.01), what


@pytest.mark.parametrize(
    "model, plan",
    [
        ("dense", "tp=2,dp_shard=2,microbatch=4"),
        pytest.param("dense", "pp=2,cp=2,context=ulysses", marks=pytest.mark.slow),
        pytest.param("experts", "dp_shard=2,ep=2", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_together_compute_the_model_s_flops(model: str, plan: str) -> None:
    layout = Plan.parse(plan)
    run = run_config(Path("no data"), model={**MODELS[model], "layers": 2 * layout.pp})
    per_stage = layout.world_size // layout.pp
    stages = [simulate_rank(layout, run, stage * per_stage) for stage in range(layout.pp)]
    computed = per_stage * sum(
        event.flops for trace in stages for event in trace.events if isinstance(event, Operation)
    )
    tokens = run.train.global_batch * run.data.seq_len
    assert computed == pytest.approx(tokens * train_flops_per_token(run.model, run.data.seq_len), rel=0.01)


@pytest.mark.parametrize(
    "model, plan, rank",
    [
        pytest.param("dense", "dp_shard=2,zero=3", 0, marks=pytest.mark.slow),
        pytest.param("experts", "zero=1,tp=2", 1, marks=pytest.mark.slow),
        pytest.param("dense", "pp=2,dp_shard=2,zero=3", 0, marks=pytest.mark.slow),
        ("dense", "pp=4,zero=0", 3),
    ],
)
def test_microbatches_that_repeat_need_not_be_traced(model: str, plan: str, rank: int) -> None:
    layout = Plan.parse(plan)
    microbatches = 10 if layout.pp > 1 else 6
    run = run_config(Path("no data"), model=MODELS[model], train={"global_batch": microbatches * layout.dp})
    some, each = simulate_rank(layout, run, rank), traced(layout, run, rank)
    assert simulated(some) == simulated(each)
    kinds = [[event for event in trace.events if isinstance(event, Operation | SendEvent)] for trace in (some, each)]
    assert [e[:2] for e in kinds[0]] == [e[:2] for e in kinds[1]]


def test_backward_goes_on_while_fsdp_sums_gradients() -> None:
    """Whoever needs a sum waits for it, and so does the next layer's, whose buffer takes its place; no one else."""
    trace = simulate_rank(Plan(dp_shard=2), run_config(Path("no data"), model=UNEVEN, train={"global_batch": 2}), 0)
    worked, sums, sent = 0, {}, 0
    waited: dict[int, int] = {}
    for event in trace.events:
        if isinstance(event, SendEvent):
            sent += 1
            if event.kind == "reduce_scatter":
                sums[sent] = worked
        elif isinstance(event, WaitEvent) and sent - event.messages_ago in sums:
            waited.setdefault(sent - event.messages_ago, worked)
        elif isinstance(event, Operation) and event.after is None:
            worked += event.flops
    assert waited.keys() == sums.keys()
    assert sum(waited[number] > begin for number, begin in sums.items()) >= UNEVEN["layers"] - 1


def test_memory_at_the_peak_has_a_place_and_a_purpose() -> None:
    trace = simulate_rank(Plan(microbatch=8), run_config(Path("no data"), model=UNEVEN), 0)
    state = state_bytes(Plan(), run_config(Path("no data"), model=UNEVEN))
    assert trace.before["parameters"] == state.parameters
    places = {(event.where.phase, event.where.layer) for event in trace.events if isinstance(event, Change)}
    assert {(phase, layer) for phase in ("forward", "backward") for layer in range(4)} <= places
    left: Counter[str] = Counter()
    for event in trace.events:
        if isinstance(event, Change):
            left[event.memory.category] += event.bytes
            if event.where.phase == "optimizer":
                break
    assert left["gradients"] == state.gradients, "all that backward leaves, and nothing else"


@pytest.mark.slow
def test_a_rank_of_16384_takes_less_than_a_minute() -> None:
    from argosy.config.load import load

    sizes = {"model.preset": "llama3.1-405b", "train.global_batch": 2048, "data.seq_len": 8192}
    plan = Plan.parse("tp=8,pp=16,dp_shard=128,precision=bf16,recompute=full")
    began = time.process_time()
    trace = simulate_rank(plan, load(None, sizes), 0)
    assert time.process_time() - began < 60
    assert trace.before["parameters"] == state_bytes(plan, load(None, sizes)).parameters
