"""This rank's part of a model: what it reports, what it asks of others, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from argosy.models.microbatch import Microbatch, microbatches
from argosy.observe.clock import StepClock
from argosy.observe.wire import OperatorWatch, message_of
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from tiny import EAGER, decoder, eager, laid_out, train_step

ALONE = World()
ROWS = np.random.default_rng(0).integers(1, 400, (8, 33)).astype(np.int32)
EXPERTS = {"moe": {"experts": 4, "expert_ffn_width": 16}}


def batch_of(model: ParallelModel, plan: Plan) -> list[Microbatch]:
    """This rank's rows of ROWS."""
    share = len(ROWS) // plan.dp
    return microbatches(ROWS[model.dp_rank * share :][:share], plan.microbatch, 0, torch.device("cpu"))


class Groups(OperatorWatch):
    """The sizes of the groups that collectives and messages are called in."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def saw(self, operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
        if (message := message_of(operator, args, {})) is not None:
            self.sizes.add(message.group.size())


def group_sizes(world: World, plan: str, sections: dict[str, Any]) -> set[int]:
    layout = eager(plan)
    with Groups() as groups:
        step = train_step(world, layout, **sections)
        batch = batch_of(step.state.model, layout)
        for _ in range(2):
            step.apply(step.update(step.exchange(step.forward_backward(batch)), learning_rate=1e-2))
        step.state.model.loss(batch[: step.state.model.microbatches_at_once])
    return groups.sizes


@pytest.mark.parametrize(
    ("plan", "sections"),
    [
        ("tp=2,zero=1", {}),
        ("pp=2,zero=2", {"optimizer": {"kind": "muon"}}),
        ("dp_shard=2,ep=2,zero=1", {"model": EXPERTS, "optimizer": {"kind": "muon"}}),
        ("dp_shard=2", {}),
        ("cp=2", {}),
    ],
)
def test_no_collective_is_called_in_a_group_of_one_rank(workers, plan, sections):
    assert workers.run(2, group_sizes, plan, sections) == [{2}, {2}]


@pytest.mark.parametrize("zero", range(4))
def test_a_single_process_needs_no_process_group(zero):
    assert not dist.is_initialized()
    assert group_sizes(ALONE, f"zero={zero}", {"optimizer": {"kind": "muon"}}) == set()


def shares(world: World, plan: str) -> tuple[float, float]:
    """What this rank reports of the summed loss, in training and in evaluation."""
    layout = eager(plan)
    model = laid_out(world, layout)
    batch = batch_of(model, layout)
    trained = model.forward_backward(batch, 1.0, StepClock(world.device)).item()
    model.finish_gradients()
    at_once = model.microbatches_at_once
    return trained, sum(model.loss(batch[i : i + at_once]).item() for i in range(0, len(batch), at_once))


@pytest.mark.parametrize("plan", ["", "dp_replicate=2", "tp=2", "cp=2", "pp=2"])
def test_shares_of_the_loss_add_up_to_that_of_the_whole_batch(workers, plan):
    found = workers.run(eager(plan).world_size, shares, plan)
    (whole,) = microbatches(ROWS, len(ROWS), 0, torch.device("cpu"))
    expected = decoder()(whole.tokens_BT, whole.targets_BT, whole.positions_BT).item()
    assert [sum(values) for values in zip(*found, strict=True)] == pytest.approx([expected] * 2, rel=1e-5)


def ends_after_a_step(world: World, plan: str) -> list[torch.Tensor]:
    """The embeddings that this rank computes with, of all its stages."""
    layout = eager(plan)
    step = train_step(world, layout, model={"layers": 4, "tie_embeddings": True})
    batch = batch_of(step.state.model, layout)
    step.apply(step.update(step.exchange(step.forward_backward(batch)), learning_rate=1e-2))
    assert sum(piece.name == "embedding.weight" for piece in step.state.model.pieces) <= 1
    return [p.detach().clone() for part in step.state.model.parts for n, p in part.named_parameters() if "embed" in n]


@pytest.mark.parametrize(("plan", "held"), [("pp=2", [1, 1]), ("pp=2,schedule=zbv", [2, 0])])
def test_a_tied_embedding_stays_one_wherever_it_is_held(workers, plan, held):
    found = workers.run(2, ends_after_a_step, plan)
    assert [len(embeddings) for embeddings in found] == held
    first, *others = [embedding for embeddings in found for embedding in embeddings]
    assert not torch.equal(first, decoder(layers=4, tie_embeddings=True).embedding.weight)
    assert all(torch.equal(first, other) for other in others)


def test_an_optimizer_in_host_memory_gives_the_same_weights():
    def weights(plan: Plan) -> list[torch.Tensor]:
        step = train_step(ALONE, plan)
        model = step.state.model
        assert (model.masters is model.pieces) == (plan.offload == "none")
        for _ in range(2):
            loss = step.forward_backward(batch_of(model, plan))
            step.apply(step.update(step.exchange(loss), learning_rate=1e-2))
        return [piece.value for piece in model.pieces]

    offloaded = EAGER.model_copy(update={"offload": "optimizer"})
    assert all(map(torch.equal, weights(EAGER), weights(offloaded)))


def recomputed(world: World) -> tuple[tuple[float, int], list[tuple[float, int]], bool]:
    """Give this rank's own loss and bits, those from both ranks' rows, and True if its gradient is as before."""
    plan = eager("dp_replicate=2")
    model = laid_out(world, plan)
    batches = [microbatches(ROWS[4 * rank :][:4], 1, 0, world.device) for rank in range(2)]
    model.watch(True)
    loss = model.forward_backward(batches[world.rank], 1.0 / ROWS[:, 1:].size, StepClock(world.device))
    model.finish_gradients()
    before = [piece.value.grad.clone() for piece in model.pieces]
    again = [model.recompute(batch, 1.0, ROWS[:, 1:].size) for batch in batches]
    same = all(torch.equal(piece.value.grad, grad) for piece, grad in zip(model.pieces, before, strict=True))
    return ((loss / ROWS[:, 1:].size).item(), model.bits()), again, same


def test_another_s_gradient_is_computed_to_the_bit_and_leaves_the_own_alone(workers):
    (first, of_first, same), (second, of_second, also) = workers.run(2, recomputed)
    assert of_first == of_second == [first, second] and first != second
    assert same and also
