"""The planner's closed forms against the simulator, which runs the real step: memory, and axes on networks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.plan.cost.collectives import all_reduce_s, gather_s, send_s
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.cost_model import CostModel, first_of
from argosy.plan.cost.memory_model import MemoryModel
from argosy.plan.cost.rates import System
from argosy.plan.cost.step_time import StepModel
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.topology import Topology
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.workload import Workload
from argosy.simulate.simulate import simulate, simulate_rank
from argosy.simulate.timeline import COMPUTE, draw

BOTTOM = ("embedding", "blocks.0", "blocks.1")
MATRICES = ("embedding", "blocks.*.attention.*", "blocks.*.mlp.*", "head")
DENSE, MIXTURE = "llama3-8b", "mixtral-8x7b"
FEW_TOKENS = {"data.seq_len": 128, "train.global_batch": 2, "model.layers": 6, "model.vocab_size": 4096}
"""The end of backward is the peak."""
QUICK: list[tuple[str, str, dict[str, Any]]] = [
    (DENSE, "microbatch=2", {"lora.rank": 16, "model.layers": 2}),
    (MIXTURE, "dp_shard=4,ep=4,zero=1", {"model.layers": 2}),
    ("llama-20m", "dp_shard=2,zero=1,precision=fp32", FEW_TOKENS),
]
SLOW: list[tuple[str, str, dict[str, Any]]] = [
    (DENSE, "dp_shard=8,recompute=full", {}),
    (DENSE, "precision=fp32", {}),
    (DENSE, "microbatch=2", {}),
    (DENSE, "precision=fp32,recompute=selective", {}),
    (DENSE, "precision=fp32,recompute=full", {}),
    (DENSE, "weights=bf16", {}),
    (DENSE, "dp_shard=8,zero=1", {}),
    (DENSE, "dp_shard=8,weights=bf16", {}),
    (DENSE, "dp_shard=8,zero=2", {}),
    (DENSE, "dp_shard=8", {}),
    (DENSE, "cp=4", {}),
    (DENSE, "offload=all,recompute=full", {}),
    (DENSE, "tp=4,microbatch=2", {}),
    (DENSE, "tp=4,microbatch=2,async_tp=true", {}),
    (DENSE, "pp=4", {}),
    (DENSE, "pp=4,recompute=full", {}),
    (DENSE, "pp=2,schedule=interleaved_1f1b,stages_per_rank=2", {}),
    (DENSE, "pp=2", {"model.mtp.modules": 1, "model.layers": 5}),
    (DENSE, "microbatch=2", {"model.mtp.modules": 1}),
    (DENSE, "microbatch=2", {"train.frozen": BOTTOM}),
    (DENSE, "microbatch=2", {"train.frozen": MATRICES}),
    (DENSE, "dp_shard=8", {"lora.rank": 16}),
    (DENSE, "pp=2", {"lora.rank": 16, "lora.base": "nf4", "model.vocab_size": 128256, "model.layers": 4}),
    (DENSE, "tp=4", {"lora.rank": 16}),
    (DENSE, "dp_shard=8,recompute=selective", {"lora.rank": 64}),
    (DENSE, "dp_shard=8,zero=1", {"lora.rank": 16, "lora.kind": "dora"}),
    (DENSE, "dp_shard=8,recompute=full", {"lora.rank": 16, "lora.base": "nf4"}),
    (DENSE, "microbatch=2", {"lora.rank": 16, "lora.base": "int8"}),
    (DENSE, "microbatch=2,recompute=full", {"lora.rank": 16, "lora.dropout": 0.1}),
    (DENSE, "tp=4", {"lora.rank": 16, "lora.dropout": 0.1}),
    (MIXTURE, "microbatch=1", {"model.layers": 2}),
    (MIXTURE, "dp_shard=4,ep=4", {}),
    (MIXTURE, "dp_shard=4,ep=4,overlap_experts=true", {}),
    (MIXTURE, "microbatch=2", {"lora.rank": 16, "lora.kind": "dora", "model.layers": 2}),
    (MIXTURE, "dp_shard=4,ep=4,zero=1", {"lora.rank": 16, "lora.base": "int8"}),
    ("qwen3-8b", "microbatch=2", {}),
    ("gemma2-2b", "microbatch=1", {}),
    ("olmo2-7b", "microbatch=1", {}),
    ("command-r7b", "microbatch=1", {}),
    ("gpt-oss-20b", "microbatch=1", {}),
    ("deepseek-v2-lite", "microbatch=1", {}),
    ("deepseek-v2-lite", "dp_shard=8", {}),
    ("qwen3-next-80b-a3b", "recompute=selective", {}),
    ("qwen3.5-4b", "microbatch=1", {"lora.rank": 16}),
    (MIXTURE, "recompute=full,recompute_every=2", {"model.moe.every": 2}),
    ("llama-60m", "precision=fp32,microbatch=4", {}),
]
SMALL = 0.02
"""Share of the peak by which a category may differ, whatever its size: a moment earlier or later it is another's."""


def run_of(preset: str, plan: Plan, keys: dict[str, Any]) -> RunConfig:
    """A few layers of the published sizes, and two microbatches for each rank, or as many as fill a pipeline."""
    sizes = {"model.layers": 2 * plan.pp if plan.pp > 1 else 4, "model.vocab_size": 32000, "model.mtp.modules": 0}
    batch = plan.dp * plan.microbatch * 2 * plan.pp
    settings = {"model.preset": preset, "data.seq_len": 4096, "train.global_batch": batch}
    return load("demo", {**settings, **sizes, **{key: _listed(value) for key, value in keys.items()}})


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("preset", "written", "keys"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_the_closed_form_has_the_simulated_peak(preset, written, keys):
    """In total within 3 %, and each category within 5 % or `SMALL` of the total."""
    precision = "" if "precision" in written else ",precision=bf16"
    plan = Plan.parse(f"{written}{precision},compile=false")
    run = run_of(preset, plan, keys)
    peak = simulate(plan, run, [0], Cluster.parse("8xh100"))[0].record.memory
    found = Counter[str]()
    for category, size in peak.at_peak.items():
        found[OF_SIMULATED.get(category, COMES_AND_GOES)] += size
    planned = planned_peak(plan, run)
    assert sum(planned.values()) == pytest.approx(peak.peak_bytes, rel=0.03)
    if plan.shards_parameters:  # gradients on their way to other ranks are in a buffer of their sum
        for sizes in (planned, found):
            sizes[COMES_AND_GOES] += sizes.pop("gradients")
    assert planned == {name: pytest.approx(found[name], rel=0.05, abs=SMALL * peak.peak_bytes) for name in planned}


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [("", {"kind": "muon"}), ("dp_replicate=2", {"kind": "muon"}), ("", {"kind": "lion", "state": "int8"})],
)
def test_an_update_takes_what_the_simulated_one_does(plan, optimizer):
    """The peak of few tokens, within 4 %. Muon computes in fp32 on a CPU, whose operators the simulator has."""
    sizes = {"model.preset": "llama-60m", "model.vocab_size": 2000, "model.layers": 1, "data.seq_len": 16}
    run = load("demo", {**sizes, "train.global_batch": 4}).with_keys(optimizer=optimizer)
    laid_out, cluster = Plan.parse(f"{plan},compile=false".lstrip(",")), Cluster.parse("8xh100")
    peak = simulate(laid_out, run, [0], cluster)[0].record.memory
    system = replace(CostModel.of(run, cluster).system, direction_bytes=4, chunk_rows=0)
    found = MemoryModel(Layouts.of([laid_out]), Workload.of(run), system, Constants()).predict()
    assert peak.peak_phase == "optimizer"
    allocated = float(np.squeeze(found.total - found.reserve)) - Constants().workspace_bytes
    assert allocated == pytest.approx(peak.peak_bytes, rel=0.04)


COMES_AND_GOES = "comes and goes"
"""Activations, what the loss needs, gathered weights, and buffers: the simulator tells those of a pass by their end."""
OF_SIMULATED = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer"}


def planned_peak(plan: Plan, run: RunConfig) -> dict[str, float]:
    """Return the planner's bytes of rank 0 by category, without those of the device's own."""
    constants = Constants()
    model = MemoryModel(Layouts.of([plan]), Workload.of(run), System(buckets=1), constants)
    found = model.on_rank(first=True, last=plan.pp == 1)
    state = {name: float(np.squeeze(getattr(found, name))) for name in OF_SIMULATED.values()}
    allocated = float(np.squeeze(found.total - found.reserve)) - constants.workspace_bytes
    return {**state, COMES_AND_GOES: allocated - sum(state.values())}


NETWORKS = (
    {"kind": "fat-tree", "nodes_per_leaf": 2, "oversubscription": 8.0},
    {"kind": "rail-only"},
    {"kind": "dragonfly", "nodes_per_router": 1, "routers_per_group": 4, "global_links": 1},
    {"kind": "optical", "circuits": 3},
    {"kind": "torus", "dims": (4, 8)},
)


def test_a_network_slows_the_real_step_s_messages_as_it_does_the_planner_s() -> None:
    """Tensor-parallel sums within 15 % (the planner leaves out embedding and head), sends of a stage in both directions
    within 2 %, and gradients with one ratio on all networks: the planner's rank has embedding and head, rank 0 one."""
    plan = Plan.parse("pp=2,dp_shard=8,tp=2,zero=1,precision=bf16,compile=false")
    sizes = {"model.preset": DENSE, "model.layers": 8, "model.vocab_size": 32000}
    run = load("demo", {**sizes, "data.seq_len": 4096, "train.global_batch": 16})
    trace, rows, ratios = simulate_rank(plan, run, 0), Layouts.of([plan]), []
    for network in NETWORKS:
        cluster = Cluster.parse("8x4xa100").changed(topology=Topology(**network))
        rates = CostModel.of(run, cluster).step_model(rows).rates
        model = StepModel(rows, Workload.of(run), rates, System(), Constants())
        spans = [span for span in draw({0: trace}, cluster, rates.fabric)[0].spans if span.track != COMPUTE]
        taken = {axis: sum(span.duration_s for span in spans if span.track == axis) for axis in ("tp", "pp", "shard")}
        many, layers = first_of(model.microbatches), run.model.layers / plan.pp
        sums = 4 * many * layers * first_of(all_reduce_s(model.hidden, model.tensor_group, False))
        assert sums == pytest.approx(taken["tp"], rel=0.15), network
        assert many * first_of(send_s(model.hidden_bytes, model.stage_group)) == pytest.approx(taken["pp"], rel=0.02)
        ratios.append(2 * first_of(gather_s(4 * model.summed_parameters[0], model.data_group)) / taken["shard"])
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=0.08)
