"""Fully sharded: parameters are gathered where they are used, and gradients are summed once a step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # there is no public way to see every collective

from argosy.models.decoder import microbatches
from argosy.observe.clock import StepClock
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from tiny import eager, gradients, laid_out

ROWS = np.random.default_rng(0).integers(0, 400, (8, 33)).astype(np.int32)
FSDP_UNITS = 3  # two blocks, and the rest


class Collectives(TorchDispatchMode):
    """Counts the operations of process groups, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            self.counts[func._schema.name.strip("_").removeprefix("c10d::").strip("_")] += 1
        return func(*args, **(kwargs or {}))


def collectives(world: World, plan: str) -> tuple[int, int, int]:
    """Gathers, sums and bytes of parameters that stay, in one step of several microbatches."""
    layout = eager(plan)
    model = laid_out(world, layout)
    share = len(ROWS) // layout.dp
    batch = microbatches(ROWS[model.dp_rank * share :][:share], layout.microbatch, 0, world.device)
    with Collectives() as seen:
        model.forward_backward(batch, 1.0, StepClock(world.device))
        model.finish_gradients()
    gathers = sum(n for op, n in seen.counts.items() if "allgather" in op)
    scatters = sum(n for op, n in seen.counts.items() if "reduce_scatter" in op)
    return gathers, scatters, sum(piece.value.nbytes for piece in model.pieces)


@pytest.mark.parametrize("plan", ["dp_shard=4,microbatch=2", "dp_shard=4", "dp_shard=2"])
def test_gradients_are_summed_once_a_step_however_many_microbatches(workers, plan):
    microbatches = eager(plan).microbatches(len(ROWS))
    for gathers, scatters, _ in workers.run(eager(plan).world_size, collectives, plan):
        assert scatters == FSDP_UNITS
        # In each microbatch blocks are gathered for forward and again for backward; the rest stays for the latter,
        # and the last block, with which backward begins, may too.
        assert FSDP_UNITS * microbatches <= gathers <= 2 * FSDP_UNITS * microbatches


def test_a_rank_holds_its_share_and_no_more(workers):
    (alone,) = workers.run(1, collectives, "microbatch=8")
    for _, _, nbytes in workers.run(4, collectives, "dp_shard=4"):
        assert nbytes == pytest.approx(alone[2] / 4, rel=0.01)


def dtypes(world: World, plan: str) -> dict[str, torch.dtype]:
    layout = eager(plan)
    model = laid_out(world, layout)
    share = len(ROWS) // layout.dp
    batch = microbatches(ROWS[model.dp_rank * share :][:share], layout.microbatch, 0, world.device)
    model.forward_backward(batch, 1.0 / ROWS.size, StepClock(world.device))
    model.finish_gradients()
    assert all(isinstance(piece.parameter, DTensor) for piece in model.pieces)
    assert {piece.value.dtype for piece in model.pieces} == {torch.float32}
    return {name: gradient.dtype for name, gradient in gradients(model).items()}


@pytest.mark.parametrize("plan", ["dp_shard=2,precision=bf16", "dp_shard=2,precision=bf16,reduce=bf16"])
def test_weights_and_gradients_are_fp32_whatever_the_arithmetic(workers, plan):
    for found in workers.run(2, dtypes, plan):
        assert set(found.values()) == {torch.float32}


@pytest.mark.parametrize(
    ("plan", "sharded"),
    [("", False), ("dp_replicate=4", False), ("dp_shard=2", True), ("cp=2", True), ("dp_shard=2,zero=2", False)],
)
def test_parameters_are_sharded_where_there_is_someone_to_share_with(plan, sharded):
    assert Plan.parse(plan).shards_parameters == sharded
