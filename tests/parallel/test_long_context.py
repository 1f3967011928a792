"""A sequence that is too long for one rank's memory fits on n: each holds an n-th of the activations."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from argosy.models.microbatch import microbatches
from argosy.observe.clock import StepClock
from argosy.parallel.world import World
from argosy.simulate.record import LiveBytes
from tiny import eager, laid_out

SEQ_LEN = 1024
MODEL = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "head_width": 8, "ffn_width": 32, "vocab_size": 64}
"""So narrow that gradients are a hundredth of the activations."""


def most_bytes(world: World, plan: str, end_of_document: int) -> int:
    """The most memory that one rank's forward and backward of a row need at once, beside the parameters."""
    model = laid_out(world, eager(plan), model=MODEL, data={"seq_len": SEQ_LEN}, train={"global_batch": 1})
    row = np.random.default_rng(0).integers(1, MODEL["vocab_size"], (1, SEQ_LEN + 1)).astype(np.int32)
    batch = microbatches(row, 1, end_of_document, world.device)
    for _ in range(2):  # tables that are kept are there in the second step
        gc.collect()
        with LiveBytes() as live:
            model.forward_backward(batch, 1.0, StepClock(world.device))
        model.finish_gradients()
        model.zero_gradients()
    return live.most


@pytest.mark.parametrize("end_of_document", [0, 7], ids=["one document", "many documents"])
@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_a_rank_holds_its_share_of_the_activations(workers, context: str, end_of_document: int):
    (alone,) = workers.run(1, most_bytes, "microbatch=1", end_of_document)
    n = 2 if context == "ulysses" else 4  # a head at least for each
    for most in workers.run(n, most_bytes, f"cp={n},zero=0,context={context}", end_of_document):
        assert most == pytest.approx(alone / n, rel=0.15)
