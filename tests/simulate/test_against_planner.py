"""The planner's closed form of memory against the simulator, which runs the real step: within 5 %."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.memory_model import MemoryModel
from argosy.plan.cost.rates import System
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.workload import Workload
from argosy.simulate.simulate import simulate

QUICK = [
    ("llama3-8b", "dp_shard=8,recompute=full"),
    ("mixtral-8x7b", "dp_shard=4,ep=4"),
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
    *(
        pytest.param("llama3-8b", plan, "lora", marks=pytest.mark.slow)
        for plan in ("dp_shard=8", "dp_shard=8,zero=1", "recompute=selective", "tp=4", "pp=4")
    ),
    pytest.param("llama3-8b", "dp_shard=8,zero=1", "dora", marks=pytest.mark.slow),
    pytest.param("llama3-8b", "recompute=full", "dora", marks=pytest.mark.slow),
]
ROWS = [
    *((*row, ()) for row in QUICK),
    *ADAPTERS,
    *FROZEN,
    *(pytest.param(*row, (), marks=pytest.mark.slow) for row in SLOW),
]


def run_of(preset: str, frozen: Sequence[str]) -> RunConfig:
    """A few layers of the published sizes; `frozen` may be the kind of an adapter."""
    keys = {"model.layers": 8 if preset == "llama3-8b" else 4, "model.vocab_size": 32000}
    sections = {"data.seq_len": 4096, "train.global_batch": 16, "train.frozen": list(frozen)}
    if isinstance(frozen, str):
        sections |= {"train.frozen": [], "lora.rank": 16, "lora.kind": frozen}
    return load("demo", {"model.preset": preset, **keys, **sections})


@pytest.mark.parametrize(("preset", "written", "frozen"), ROWS)
def test_the_closed_form_has_the_simulated_peak(preset, written, frozen):
    run, plan = run_of(preset, frozen), Plan.parse(f"{written},precision=bf16,compile=false")
    simulated = simulate(plan, run, [0], Cluster.parse("8xh100"))[0].peak_bytes
    constants = Constants()
    model = MemoryModel(Layouts.of([plan]), Workload.of(run), System(), constants)
    found = model._rank(first=True, last=plan.pp == 1)
    allocated = found.total - found.reserve - constants.workspace_bytes  # those two are the device's, not the step's
    assert float(np.squeeze(allocated)) == pytest.approx(simulated, rel=0.05)
