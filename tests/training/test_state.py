"""A step is applied whole or not at all, and by what all ranks know of it: its decision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from argosy.models.batch import microbatches
from argosy.observe.clock import StepClock
from argosy.optim.optimizer import Optimizer
from argosy.parallel.expert import loads_of
from argosy.parallel.gradients import square_share
from argosy.parallel.world import World
from argosy.precision.scaler import LossScaler
from argosy.training.state import Decision, TrainState
from argosy.training.step import Share, exchange, forward_backward
from tiny import EAGER, laid_out, run_config

ALONE = World()
EXPERTS = {"moe": {"experts": 4, "expert_ffn_width": 32, "balance": "bias"}}
ROWS = np.random.default_rng(0).integers(1, 400, (4, 33)).astype(np.int32)


def pending(**model: Any) -> tuple[TrainState, Decision]:
    """A state with a whole gradient, and the decision to apply it."""
    run = run_config(Path("no data"), model=model)
    parallel = laid_out(ALONE, EAGER, model=model)
    state = TrainState(parallel, Optimizer(parallel.masters, run.optimizer), LossScaler(scale=1.0, growth_steps=0))
    loss = forward_backward(parallel, microbatches(ROWS, 2, 0, ALONE.device), 1.0, StepClock(ALONE.device))
    loads = loads_of(parallel.moes, run.model, ALONE.device)
    outcome = exchange(Share(loss, square_share(parallel.pieces), loads), ALONE)
    state.pending = True
    decision = Decision(
        step=0,
        loss=outcome.loss,
        gradient_norm=outcome.gradient_norm,
        max_norm=0.1,
        learning_rate=1e-2,
        tokens=128,
        loads=outcome.loads,
    )
    return state, decision


def values(state: TrainState) -> list[torch.Tensor]:
    return [piece.value.clone() for piece in state.model.pieces]


def test_a_step_counts_with_its_update():
    state, decision = pending()
    before = values(state)
    state.apply(decision)
    assert (state.step, state.tokens, state.pending, state.in_update) == (1, 128, False, False)
    assert state.decided == decision
    assert not any(map(torch.equal, before, values(state)))


def test_whoever_follows_later_with_the_same_decision_gets_the_same_bits():
    (first, decision), (second, _) = pending(**EXPERTS), pending(**EXPERTS)
    first.apply(decision)
    second.apply(decision)
    assert all(map(torch.equal, values(first), values(second)))
    assert all(map(torch.equal, first.model.buffers().values(), second.model.buffers().values()))


def test_biases_of_experts_move_with_the_update_and_not_before():
    state, decision = pending(**EXPERTS)
    assert not any(buffer.any() for buffer in state.model.buffers().values())
    state.apply(decision)
    assert all(buffer.any() for buffer in state.model.buffers().values())


def test_an_update_that_breaks_off_is_known_to_be_under_way(monkeypatch):
    state, decision = pending()

    def peer_is_gone() -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(state.optimizer, "step", peer_is_gone)
    with pytest.raises(RuntimeError, match="closed by peer"):
        state.apply(decision)
    assert state.in_update and state.step == 0


def test_what_an_update_takes_of_other_ranks_changes_nothing_and_comes_before_it():
    (first, decision), (second, _) = pending(), pending()
    before, boxes = values(first), {box: tensor.clone() for box, tensor in first.boxes().items()}
    first.prepare(decision)
    assert (first.step, first.pending, first.in_update, first.can_follow) == (0, True, False, True)
    assert all(map(torch.equal, before, values(first)))
    assert all(torch.equal(tensor, boxes[box]) for box, tensor in first.boxes().items())
    first.apply(decision)
    second.apply(decision)
    assert all(map(torch.equal, values(first), values(second))) and not first.is_prepared


def test_a_gradient_that_is_dropped_leaves_the_state_as_it_was():
    state, _ = pending()
    before = values(state)
    state.drop_gradient()
    assert not state.pending and state.step == 0
    assert all(map(torch.equal, before, values(state)))
    assert all(piece.value.grad is None for piece in state.model.pieces)
