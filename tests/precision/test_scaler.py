"""The scale of the loss: down at once, up after a while, and through a checkpoint."""

from __future__ import annotations

import pytest

from argosy.precision.scaler import LossScaler


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_overflow_halves_the_scale_and_drops_the_step(norm):
    scaler = LossScaler(scale=8.0)
    assert not scaler.update(norm)
    assert scaler.scale == 4.0


def test_scale_grows_after_as_many_good_steps_in_a_row():
    scaler = LossScaler(scale=8.0, growth_steps=3)
    for norm in (1.0, 1.0, float("inf"), 1.0, 1.0):
        scaler.update(norm)
    assert scaler.scale == 4.0
    assert scaler.update(1.0)
    assert scaler.scale == 8.0


def test_scale_does_not_fall_below_its_floor():
    scaler = LossScaler(scale=4.0, floor=2.0)
    assert not scaler.is_at_floor
    for _ in range(5):
        scaler.update(float("inf"))
    assert scaler.scale == 2.0 and scaler.is_at_floor


def test_scale_does_not_rise_above_its_ceiling_nor_resume_there():
    higher, scaler = (LossScaler(4.0, growth_steps=1, ceiling=ceiling) for ceiling in (64.0, 16.0))
    for _ in range(9):
        higher.update(1.0)
        scaler.update(1.0)
    assert (higher.scale, scaler.scale) == (64.0, 16.0)
    scaler.load_state(higher.state())
    assert scaler.scale == 16.0


def test_resumed_scaler_grows_when_the_first_would_have():
    first, resumed = LossScaler(growth_steps=4), LossScaler(growth_steps=4)
    for _ in range(3):
        first.update(1.0)
    resumed.load_state(first.state())
    for scaler in (first, resumed):
        scaler.update(1.0)
    assert first.scale == resumed.scale == 2.0**17
