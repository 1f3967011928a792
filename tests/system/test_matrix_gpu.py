"""The matrix of faults on GPUs: a survivor inside a collective on the device lives on. It has been run on none yet.

pytest tests/system/test_matrix_gpu.py      # on a machine with two GPUs
"""

from __future__ import annotations

import pytest
import torch

from matrix import AGAIN_S, PLANS, Disturbed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason="needs two GPUs: that NCCL's groups are aborted, and survivors live on, is shown on no machine here",
    ),
]
ON_GPUS = ("--launch.device", "cuda", "--train.deterministic", "true")
POINTS = ["forward", "bucket", "exchange", "commit", "optimizer"]


def survived(run: Disturbed, source: str) -> None:
    """One process was replaced, and the other is the one that began: it was not killed for what it waited for."""
    (died,) = run.events("worker_died")
    assert run.time_to(run.events("fault")[0]["time_s"], "recovered") <= AGAIN_S
    assert {r["source"] for r in run.events("recovered")} == {source}
    assert len({e["pid"] for e in run.events("worker_started")} - {died["pid"]}) == 2


@pytest.mark.parametrize("point", POINTS)
def test_a_survivor_leaves_a_collective_on_its_device(disturbed, undisturbed, point):
    run = disturbed(PLANS["replicas"], f"kill@{point}:step=7,rank=1", *ON_GPUS).end()
    survived(run, "live")
    run.check(undisturbed(PLANS["replicas"], *ON_GPUS), "worker_died")


@pytest.mark.parametrize("plan", ["sharded", "pipeline", "tensor"])
def test_so_it_does_where_the_state_has_no_replica(disturbed, undisturbed, plan):
    never = ("--checkpoint.every_steps", "0")
    run = disturbed(PLANS[plan], "kill@backward:step=7,rank=1", *never, *ON_GPUS).end()
    survived(run, "memory")
    run.check(undisturbed(PLANS[plan], *ON_GPUS), "worker_died")
