"""One step's arithmetic: however the batch is cut, the gradient is that of the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from argosy.observe.clock import StepClock
from argosy.parallel.data import GradientReducer
from argosy.parallel.world import World, lay_out
from argosy.models.batch import microbatches
from argosy.training.step import StepOutcome, Wishes, forward_backward
from tiny import decoder, eager

END = 0
ROWS = np.random.default_rng(0).integers(0, 400, (8, 17)).astype(np.int32)


def step(world: World, plan: str, wishes: dict[int, Wishes] | None = None) -> tuple[StepOutcome, dict[str, np.ndarray]]:
    """The outcome and the gradients of one step on ROWS, laid out as `plan` says."""
    layout = eager(plan)
    world = lay_out(world, layout)
    model, share = decoder(), len(ROWS) // layout.dp
    rows = ROWS[world.dp_rank * share : (world.dp_rank + 1) * share]
    batch = microbatches(rows, layout.microbatch, END, world.device)
    reducer = GradientReducer(model.parameters(), world.group("dp_replicate"))
    mine = (wishes or {}).get(world.rank, Wishes())
    outcome = forward_backward(model, batch, reducer, world, StepClock(world.device), mine)
    return outcome, {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def whole() -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over ROWS and its gradient, in one piece and without our step."""
    model = decoder()
    (batch,) = microbatches(ROWS, len(ROWS), END, torch.device("cpu"))
    loss = model(batch.tokens_BT, batch.targets_BT, batch.documents) / batch.targets_BT.numel()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("plan", ["microbatch=8", "microbatch=1", "dp_replicate=2,microbatch=2", "dp_replicate=4"])
def test_the_gradient_is_that_of_the_whole_batch_at_once(workers, whole, plan):
    loss, gradients = whole
    for outcome, found in workers.run(eager(plan).world_size, step, plan):
        assert outcome.loss == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_what_one_process_wishes_is_granted_to_all(workers):
    wishes = {1: Wishes(stop=True), 2: Wishes(save=True)}
    outcomes = [outcome for outcome, _ in workers.run(4, step, "dp_replicate=4", wishes)]
    assert [outcome.wishes for outcome in outcomes] == [Wishes(stop=True, save=True)] * 4
    assert len({outcome.loss for outcome in outcomes}) == 1
