"""Every schedule gives the losses and gradients of one process, in training and in evaluation."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from argosy.models.microbatch import microbatches
from argosy.observe.clock import StepClock
from argosy.parallel.world import World
from tiny import decoder, eager, gradients, laid_out

ROWS = np.random.default_rng(0).integers(0, 400, (8, 33)).astype(np.int32)
ROWS[2:4, 1:30:11] = 0  # documents end where other rows' do not
UNTIED = {"layers": 8}
TIED = UNTIED | {"tie_embeddings": True}
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]


def step(world: World, plan: str, model: dict) -> tuple[list[float], dict[str, Tensor], float]:
    """This rank's shares of the losses of two steps on the same weights, its gradients of both, and an evaluation."""
    layout = eager(plan)
    parallel = laid_out(world, layout, model=model)
    batch = microbatches(ROWS, layout.microbatch, 0, world.device)
    shares, added = [], {}
    for scale in (1.0, 4.0):
        shares.append(parallel.forward_backward(batch, scale, StepClock(world.device)).item())
        parallel.finish_gradients()
        for name, gradient in gradients(parallel).items():
            added[name] = added.get(name, 0) + gradient
        parallel.zero_gradients()
    return shares, added, parallel.loss(batch).item()


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest) -> tuple[dict, float, dict[str, Tensor]]:
    model = decoder(**request.param)
    (micro,) = microbatches(ROWS, 8, 0, torch.device("cpu"))
    loss = model(micro.tokens_BT, micro.targets_BT, micro.positions_BT)
    loss.backward()
    return request.param, loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("pp", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    ("reference", "schedule"),
    [
        *(pytest.param(UNTIED, name, id=f"untied-{name}") for name in SCHEDULES),
        *(
            # The two ends of the pipeline are on two ranks, as in test_parity, or, in a V, on one.
            pytest.param(TIED, name, id=f"tied-{name}", marks=() if name == "zbv" else pytest.mark.slow)
            for name in SCHEDULES
        ),
    ],
    indirect=["reference"],
)
def test_losses_and_gradients_are_those_of_one_process(workers, reference, schedule, pp):
    model, loss, expected = reference
    found = workers.run(pp, step, f"pp={pp},schedule={schedule}", model)
    for shares in zip(*(shares for shares, *_ in found), strict=True):
        assert sum(shares) == pytest.approx(loss, rel=1e-6) and sum(share != 0 for share in shares) == 1
    assert sum(evaluated for *_, evaluated in found) == pytest.approx(loss, rel=1e-6)
    assert set().union(*(gradients for _, gradients, _ in found)) == set(expected)
    for _, gradients_found, _ in found:
        for name, gradient in gradients_found.items():
            summed = 5 * expected[name]  # of both steps
            tolerance = 1e-5 * float(summed.abs().max())
            torch.testing.assert_close(gradient, summed, rtol=1e-4, atol=tolerance, msg=name)


def backwards_met(world: World, plan: str) -> int:
    """How often a fault may strike before a backward, in a step."""
    layout = eager(plan)
    parallel = laid_out(world, layout, model=UNTIED)
    with mock.patch("argosy.parallel.pipeline.fault", return_value=None) as met:
        batch = microbatches(ROWS, layout.microbatch, 0, world.device)
        parallel.forward_backward(batch, 1.0, StepClock(world.device))
        parallel.loss(batch)
    return sum(call.args == ("backward",) for call in met.mock_calls)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_faults_may_strike_before_every_backward(workers, schedule):
    stages = 2 if schedule not in ("gpipe", "1f1b") else 1
    met = workers.run(2, backwards_met, f"pp=2,schedule={schedule},microbatch=2")
    assert min(met) == 4 * stages  # what a schedule splits in two may come by twice


def evaluated_where_sends_wait(world: World, plan: str) -> float:
    """The loss, if a send ends when its receiver has it: gloo buffers messages, NCCL need not."""
    layout = eager(plan)
    parallel = laid_out(world, layout, model=UNTIED)
    isend, recv, received = dist.isend, dist.recv, torch.zeros(1)

    def send_and_wait(x: Tensor, group: dist.ProcessGroup, group_dst: int) -> None:
        isend(x, group=group, group_dst=group_dst).wait()
        recv(received, group=group, group_src=group_dst, tag=1)

    def receive_and_say_so(x: Tensor, group: dist.ProcessGroup, group_src: int) -> None:
        recv(x, group=group, group_src=group_src)
        isend(received, group=group, group_dst=group_src, tag=1).wait()

    with mock.patch.object(dist, "isend", send_and_wait), mock.patch.object(dist, "recv", receive_and_say_so):
        return parallel.loss(microbatches(ROWS, layout.microbatch, 0, world.device)).item()


@pytest.mark.parametrize("plan", [f"pp=2,schedule={name}" for name in SCHEDULES] + ["pp=4,schedule=interleaved_1f1b"])
def test_an_evaluation_does_not_rely_on_buffers_for_what_is_sent(workers, plan):
    alone = evaluated_where_sends_wait(World(), "microbatch=8")
    found = workers.run(eager(plan).world_size, evaluated_where_sends_wait, plan)
    assert sum(found) == pytest.approx(alone, rel=1e-6)


def held(world: World, plan: str) -> set[str]:
    """The modules that this rank has; of blocks, their numbers."""
    names = [piece.name.split(".") for piece in laid_out(world, eager(plan), model=UNTIED).pieces]
    return {name[1] if name[0] == "blocks" else name[0] for name in names}


@pytest.mark.parametrize(
    ("plan", "first", "second"),
    [
        ("pp=2", {"embedding", *"01234"}, {*"567", "norm", "head"}),  # the head costs as much as two layers
        ("pp=2,schedule=interleaved_1f1b", {"embedding", *"01456"}, {*"237", "norm", "head"}),
        ("pp=2,schedule=zbv", {"embedding", *"017", "norm", "head"}, set("23456")),
    ],
)
def test_a_rank_holds_the_layers_of_its_stages_and_no_others(workers, plan, first, second):
    found = workers.run(2, held, plan)
    assert found[0] & found[1] == set() and found[0] | found[1] == {"embedding", *"01234567", "norm", "head"}
    assert found == [first, second]


def loss_after_an_update(world: World, plan: str) -> float:
    layout = eager(plan)
    parallel = laid_out(world, layout, model=TIED)
    batch = microbatches(ROWS, layout.microbatch, 0, world.device)
    parallel.forward_backward(batch, 1.0, StepClock(world.device))
    parallel.finish_gradients()
    for piece in parallel.pieces:
        piece.value.sub_(piece.value.grad, alpha=1e-4 / layout.dp)  # every data-parallel rank has all rows here
    parallel.after_update()
    return parallel.loss(batch).item()


@pytest.mark.parametrize("plan", ["pp=2", "pp=4", "pp=2,schedule=zbv", "pp=2,dp_shard=2,zero=1", "pp=2,dp_shard=2"])
def test_after_an_update_both_ends_have_the_new_embedding(workers, plan):
    """The two ends are on two ranks, or, in a V, on one."""
    alone = loss_after_an_update(World(), "microbatch=8")
    layout = eager(plan)
    assert sum(workers.run(layout.world_size, loss_after_an_update, plan)) == pytest.approx(layout.dp * alone, rel=1e-5)
