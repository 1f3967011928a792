"""One step's arithmetic: however the batch and the model are cut, the gradient is that of the whole batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from argosy.models.microbatch import microbatches
from argosy.observe.clock import StepClock
from argosy.parallel.world import World
from argosy.precision import LossScaler
from argosy.training.step import Requests, Step, StepOutcome
from argosy.training.stop import WorldIsOver
from tiny import decoder, eager, gradients, run_config, train_step

END = 0
ROWS = np.random.default_rng(0).integers(0, 400, (8, 33)).astype(np.int32)
ROWS[1:3, 1:30:7] = END
Gradients = dict[str, np.ndarray]


def step(
    world: World,
    plan: str,
    loss_scale: float = 1.0,
    requests: dict[int, Requests] | None = None,
    fingerprints: dict[int, int] | None = None,
) -> tuple[StepOutcome, Gradients]:
    """The outcome and this rank's parameters' whole gradients of one step on ROWS, laid out as `plan` says."""
    layout = eager(plan)
    train = train_step(world, layout, model={"layers": 4})
    train.state.scaler = LossScaler(loss_scale, growth_steps=0)
    model = train.state.model
    rows = ROWS[layout.rows_of(model.dp_rank, len(ROWS))]
    batch = microbatches(rows, layout.microbatch, END, world.device)
    if fingerprints:
        train.checks.fingerprint = lambda step: torch.tensor(fingerprints[world.rank])
    loss = train.forward_backward(batch)
    scaled = {name: gradient.numpy().copy() for name, gradient in gradients(model).items()}
    return train.exchange(loss, lambda: (requests or {}).get(world.rank, Requests())), scaled


@pytest.fixture(scope="module")
def whole() -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over ROWS and its gradient, in one piece and without our step."""
    model = decoder(layers=4)
    (batch,) = microbatches(ROWS, len(ROWS), END, torch.device("cpu"))
    loss = model(batch.tokens_BT, batch.targets_BT, batch.positions_BT) / batch.targets_BT.numel()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "plan",
    [
        "microbatch=8",
        "microbatch=1",
        pytest.param("dp_replicate=2,microbatch=2", marks=pytest.mark.slow),
        "dp_replicate=4",
        pytest.param("dp_shard=4,zero=1,microbatch=2", marks=pytest.mark.slow),
        pytest.param("dp_shard=4,zero=2", marks=pytest.mark.slow),
        "dp_shard=4,zero=3",
        "dp_replicate=2,dp_shard=2,zero=1",
        pytest.param("dp_replicate=2,dp_shard=2,zero=3", marks=pytest.mark.slow),
        pytest.param("tp=4,microbatch=4", marks=pytest.mark.slow),
        pytest.param("tp=2,dp_shard=2,zero=2", marks=pytest.mark.slow),
        pytest.param("tp=2,dp_shard=2,zero=3", marks=pytest.mark.slow),
        "cp=2,tp=2,microbatch=4",
        pytest.param("cp=2,dp_shard=2,context=ulysses", marks=pytest.mark.slow),
        "pp=2,dp_shard=2",
        pytest.param("pp=4", marks=pytest.mark.slow),
        pytest.param("pp=2,tp=2,microbatch=2,schedule=gpipe", marks=pytest.mark.slow),
        pytest.param("pp=2,dp_shard=2,schedule=interleaved_1f1b", marks=pytest.mark.slow),
        pytest.param("pp=2,dp_shard=2,schedule=interleaved_zero_bubble", marks=pytest.mark.slow),
        "pp=2,dp_shard=2,schedule=zbv",
        pytest.param("pp=2,dp_shard=2,schedule=dualpipev", marks=pytest.mark.slow),
        "dp_replicate=2,shares=3:1",
        pytest.param("pp=2,layers=1:3", marks=pytest.mark.slow),
        "pp=2,dp_replicate=2,layers=3:1,shares=5:3",
        "dp_shard=4,zero=1,shares=1:3:2:2",
        pytest.param("dp_replicate=2,dp_shard=2,zero=2,shares=1:5:1:1", marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,dp_shard=2,zero=3,shares=1:3", marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,tp=2,microbatch=2,shares=3:1", marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,cp=2,microbatch=2,shares=1:3", marks=pytest.mark.slow),
        pytest.param("pp=2,dp_replicate=2,shares=1:3", marks=pytest.mark.slow),
        pytest.param("pp=2,dp_replicate=2,schedule=gpipe,shares=7:1", marks=pytest.mark.slow),
        "pp=2,dp_replicate=2,shares=3:1,schedule=interleaved_1f1b",
    ],
)
def test_the_gradient_is_that_of_the_whole_batch_at_once(workers, whole, plan):
    loss, expected = whole
    found = workers.run(eager(plan).world_size, step, plan)
    assert set().union(*(mine for _, mine in found)) == set(expected)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    for outcome, found_gradients in found:
        assert outcome.loss == pytest.approx(loss, rel=1e-5)
        assert outcome.gradient_norm == pytest.approx(norm, rel=1e-5)
        for name, gradient in found_gradients.items():
            torch.testing.assert_close(torch.from_numpy(gradient), expected[name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("plan", ["", "dp_shard=2", "pp=2"])
def test_a_loss_scale_is_on_the_gradients_and_not_on_the_loss(workers, whole, plan):
    loss, expected = whole
    for outcome, found_gradients in workers.run(eager(plan).world_size, step, plan, 1024.0):
        assert outcome.loss == pytest.approx(loss, rel=1e-5)
        for name, gradient in found_gradients.items():
            scaled = expected[name] * 1024
            torch.testing.assert_close(torch.from_numpy(gradient), scaled, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("plan", ["dp_replicate=4", "pp=2,tp=2,microbatch=2"])
def test_what_one_process_wishes_is_granted_to_all(workers, plan):
    requests = {1: Requests(stop=True), 2: Requests(save=True)}
    outcomes = [outcome for outcome, _ in workers.run(4, step, plan, 1.0, requests)]
    assert [outcome.requests for outcome in outcomes] == [Requests(stop=True, save=True)] * 4
    assert len({outcome.loss for outcome in outcomes}) == 1


@pytest.mark.parametrize(
    ("fingerprints", "differ"),
    [
        ({0: 2 * 77, 1: -77, 2: -77}, False),
        ({0: 2 * 77, 1: -77, 2: -78}, True),
        ({0: 2**63 - 1, 1: -(2**63), 2: 1}, False),  # as 64-bit integers they wrap around to 0
        ({0: 2**63 - 1, 1: -(2**63), 2: 0}, True),
        ({0: -(2**63), 1: 0, 2: 0}, True),
    ],
)
def test_shares_of_a_fingerprint_that_do_not_add_up_to_nothing_are_seen_by_all(workers, fingerprints, differ):
    outcomes = [outcome for outcome, _ in workers.run(3, step, "dp_replicate=3", 1.0, None, fingerprints)]
    assert [outcome.replicas_differ for outcome in outcomes] == [differ] * 3


def test_numbers_of_a_world_that_is_over_are_not_taken_for_those_of_all_ranks():
    """On a GPU an aborted collective returns, with any numbers."""
    train = train_step(World(), eager(""), model={"layers": 2})
    batch = microbatches(ROWS, 4, END, World().device)
    loss = train.forward_backward(batch)

    def is_over() -> None:
        raise WorldIsOver

    run = run_config(Path("no data"), model={"layers": 2})
    over = Step(run, train.state, Garbled(), StepClock(World().device), train.checks, is_over)
    with pytest.raises(WorldIsOver):
        over.exchange(loss)
    assert train.state.pending, "the gradient was whole before: a rank that is ahead can be followed"


class Garbled(World):
    """Its sums are none."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(-1.0)
