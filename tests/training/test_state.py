"""A step is applied whole or not at all, and by what all ranks know of it: its update."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from argosy.config.optimizer import LEAST_INT8
from argosy.models.microbatch import microbatches
from argosy.parallel.world import World
from argosy.training.state import StepUpdate, TrainState
from tiny import EAGER, train_step

ALONE = World()
EXPERTS = {"moe": {"experts": 4, "expert_ffn_width": 32, "balance": "bias"}}
ROWS = np.random.default_rng(0).integers(1, 400, (4, 33)).astype(np.int32)


def pending(state: str = "fp32", **model: Any) -> tuple[TrainState, StepUpdate]:
    """A state with a whole gradient, and the update to apply it. state: the format of the optimizer's moments."""
    optimizer = {"grad_clip": 0.1, "state": state}
    step = train_step(ALONE, EAGER, model=model, optimizer=optimizer, train={"global_batch": 4})
    outcome = step.exchange(step.forward_backward(microbatches(ROWS, 2, 0, ALONE.device)))
    return step.state, step.update(outcome, learning_rate=1e-2)


def values(state: TrainState) -> list[torch.Tensor]:
    return [piece.value.clone() for piece in state.model.pieces]


def test_a_step_counts_with_its_update():
    state, update = pending()
    before = values(state)
    state.apply(update)
    assert (state.step, state.tokens, state.pending, state.in_update) == (1, 128, False, False)
    assert state.last_update == update
    assert not any(map(torch.equal, before, values(state)))


def test_a_rank_that_follows_later_with_the_same_update_gets_the_same_bits():
    (first, update), (second, _) = pending(**EXPERTS), pending(**EXPERTS)
    first.apply(update)
    second.apply(update)
    assert all(map(torch.equal, values(first), values(second)))
    assert all(map(torch.equal, first.model.buffers().values(), second.model.buffers().values()))


def test_biases_of_experts_move_with_the_update_and_not_before():
    state, update = pending(**EXPERTS)
    assert not any(buffer.any() for buffer in state.model.buffers().values())
    state.apply(update)
    assert all(buffer.any() for buffer in state.model.buffers().values())


def test_an_update_that_fails_is_known_to_be_incomplete(monkeypatch):
    state, update = pending()

    def peer_is_gone(watch: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(state.optimizer, "step", peer_is_gone)
    with pytest.raises(RuntimeError, match="closed by peer"):
        state.apply(update)
    assert state.in_update and state.step == 0


def test_preparing_an_update_changes_nothing():
    (first, update), (second, _) = pending(), pending()
    before, boxes = values(first), {box: tensor.clone() for box, tensor in first.boxes().items()}
    first.prepare(update)
    assert (first.step, first.pending, first.in_update, first.can_follow) == (0, True, False, True)
    assert all(map(torch.equal, before, values(first)))
    assert all(torch.equal(tensor, boxes[box]) for box, tensor in first.boxes().items())
    first.apply(update)
    second.apply(update)
    assert all(map(torch.equal, values(first), values(second))) and not first.is_prepared


def test_moments_in_8_bits_are_widened_one_at_a_time_to_be_saved():
    state, update = pending(state="int8")
    state.apply(update)
    whole, made = state.boxes(), []
    saved = state.to_save()
    assert list(saved) == list(whole)
    for box in saved:
        assert torch.equal(saved[box], whole[box])
        if "exp_avg" in box.name and box.elements >= LEAST_INT8:
            made.append(weakref.ref(saved[box]))
            assert [tensor() is not None for tensor in made] == [False] * (len(made) - 1) + [True]
    assert len(made) > 1
    state.restored(whole)
    assert all(torch.equal(tensor, whole[box]) for box, tensor in state.boxes().items())


def test_a_gradient_that_is_dropped_leaves_the_state_as_it_was():
    state, _ = pending()
    before = values(state)
    state.drop_gradient()
    assert not state.pending and state.step == 0
    assert all(map(torch.equal, before, values(state)))
    assert all(piece.value.grad is None for piece in state.model.pieces)
