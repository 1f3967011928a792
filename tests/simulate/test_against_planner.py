"""The planner's closed forms against the simulator, which runs the real step: memory, and axes on networks."""

from __future__ import annotations

from collections.abc import Sequence

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
from argosy.simulate.rank import simulate_rank
from argosy.simulate.simulate import simulate
from argosy.simulate.timeline import COMPUTE, draw

QUICK = [
    ("llama3-8b", "dp_shard=8,recompute=full"),
    ("mixtral-8x7b", "dp_shard=4,ep=4"),
]
FURTHER = [
    ("llama3-8b", "dp_shard=8,recompute=full"),
    *(
        pytest.param(preset, plan, marks=pytest.mark.slow)
        for preset, plan in (
            ("llama3-8b", "microbatch=2"),
            ("llama3-8b", "dp_shard=8,zero=1"),
            ("mixtral-8x7b", "dp_shard=4,ep=4"),
            ("llama3-8b", "tp=4,microbatch=2"),
            ("llama3-8b", "pp=4"),
        )
    ),
]
SLOW = [
    ("llama3-8b", "microbatch=2"),
    ("llama3-8b", "tp=4,dp_shard=2,recompute=selective"),
    ("llama3-8b", "microbatch=2,recompute=full"),
    ("llama3-8b", "microbatch=2,recompute=selective"),
    ("llama3-8b", "dp_replicate=2,zero=0,microbatch=2"),
    ("llama3-8b", "dp_shard=8,zero=1"),
    ("llama3-8b", "dp_shard=8,zero=2"),
    ("llama3-8b", "dp_shard=8"),
    ("llama3-8b", "tp=4,microbatch=2"),
    ("llama3-8b", "cp=4"),
    ("llama3-8b", "pp=4"),
    ("llama3-8b", "pp=4,recompute=full"),
    ("llama3-8b", "pp=4,dp_shard=2"),
    ("llama3-8b", "pp=2,schedule=interleaved_1f1b"),
    ("mixtral-8x7b", "recompute=full"),
    ("mixtral-8x7b", "recompute=selective"),
    ("mixtral-8x7b", "dp_shard=4,ep=4,zero=1"),
    ("mixtral-8x7b", "dp_shard=4,ep=2,recompute=full"),
    ("mixtral-8x7b", "tp=2,dp_shard=2,ep=2"),
    ("mixtral-8x7b", "pp=2,dp_shard=2,ep=2,zero=1"),
]
BOTTOM = ("embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3")
MATRICES = ("embedding", "blocks.*.attention.*", "blocks.*.mlp.*", "head")
FROZEN = [
    ("llama3-8b", "dp_shard=8", BOTTOM),
    *(
        pytest.param("llama3-8b", plan, frozen, marks=pytest.mark.slow)
        for frozen in (BOTTOM, MATRICES)
        for plan in ("microbatch=2", "dp_shard=8,zero=1", "dp_shard=8", "dp_shard=8,recompute=full", "tp=4")
    ),
    pytest.param("llama3-8b", "pp=4", MATRICES, marks=pytest.mark.slow),
]
ADAPTERS = [
    ("llama3-8b", "microbatch=2", "lora"),
    pytest.param("mixtral-8x7b", "dp_shard=4,ep=4,zero=1", "int8", marks=pytest.mark.slow),
    *(
        pytest.param("llama3-8b", plan, "lora", marks=pytest.mark.slow)
        for plan in ("dp_shard=8", "dp_shard=8,zero=1", "recompute=selective", "tp=4", "pp=4")
    ),
    *(
        pytest.param("llama3-8b", plan, "nf4", marks=pytest.mark.slow)
        for plan in ("microbatch=2", "dp_shard=8,recompute=full", "pp=4")
    ),
    pytest.param("llama3-8b", "dp_shard=8,zero=1", "dora", marks=pytest.mark.slow),
    pytest.param("llama3-8b", "recompute=full", "dora", marks=pytest.mark.slow),
    *(
        pytest.param("llama3-8b", plan, "dropout", marks=pytest.mark.slow)
        for plan in ("microbatch=2", "recompute=full", "recompute=selective", "tp=4", "pp=4")
    ),
]
ROWS = [
    *((*row, ()) for row in QUICK),
    *ADAPTERS,
    *FROZEN,
    *(pytest.param(*row, (), marks=pytest.mark.slow) for row in SLOW),
]


def run_of(preset: str, frozen: Sequence[str], modules: int = 0) -> RunConfig:
    """A few layers of the published sizes; `frozen` may be the kind of an adapter, or
    of the weights beside it, or "dropout"."""
    keys = {"model.layers": 8 if preset == "llama3-8b" else 4, "model.vocab_size": 32000, "model.mtp.modules": modules}
    sections = {"data.seq_len": 4096, "train.global_batch": 16, "train.frozen": list(frozen)}
    if isinstance(frozen, str):
        key = "lora.kind" if frozen in ("lora", "dora") else "lora.base"
        more = {"lora.dropout": 0.1} if frozen == "dropout" else {key: frozen}
        sections |= {"train.frozen": [], "lora.rank": 16, **more}
    return load("demo", {"model.preset": preset, **keys, **sections})


@pytest.mark.parametrize(("preset", "written", "frozen"), ROWS)
def test_the_closed_form_has_the_simulated_peak(preset, written, frozen):
    assert_peaks_agree(run_of(preset, frozen), written)


@pytest.mark.parametrize(("preset", "written"), FURTHER)
def test_it_has_modules_of_multi_token_prediction(preset, written):
    assert_peaks_agree(run_of(preset, (), modules=1), written)


def assert_peaks_agree(run: RunConfig, written: str) -> None:
    plan = Plan.parse(f"{written},precision=bf16,compile=false")
    simulated = simulate(plan, run, [0], Cluster.parse("8xh100"))[0].peak_bytes
    constants = Constants()
    model = MemoryModel(Layouts.of([plan]), Workload.of(run), System(), constants)
    found = model._rank(first=True, last=plan.pp == 1)
    allocated = found.total - found.reserve - constants.workspace_bytes  # those two are the device's, not the step's
    assert float(np.squeeze(allocated)) == pytest.approx(simulated, rel=0.05)


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
    run, plan = run_of("llama3-8b", ()), Plan.parse("pp=2,dp_shard=8,tp=2,zero=1,precision=bf16,compile=false")
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
