"""State between steps: made once, restored bit for bit, and small where it is kept in eight bits."""

from __future__ import annotations

import pytest
import torch

from argosy.config.optimizer import ParameterSettings
from argosy.optim.piece import Piece, Slot, opened

NAMES = ("exp_avg", "exp_avg_sq")


def slot(dtype: torch.dtype = torch.float32, int8: bool = False, shape: tuple[int, ...] = (4, 256)) -> Slot:
    value = torch.ones(shape, dtype=dtype)
    return Slot(Piece("q.weight", value, shape), ParameterSettings("adamw", int8, 1.0, 0.1), 0, NAMES)


@pytest.mark.parametrize(("dtype", "int8", "is_plain"), [
    (torch.float32, False, True), (torch.float32, True, False), (torch.bfloat16, False, False),
])  # fmt: skip
def test_only_what_is_all_fp32_is_opened_without_copies(dtype, int8, is_plain):
    assert slot(dtype, int8).is_plain is is_plain


def test_nothing_is_kept_before_the_first_step():
    one = slot()
    assert one.kept() == {} and one.nbytes == 0
    assert all(not moment.any() for moment in one.moments().values())
    assert one.nbytes == 2 * 4 * 4 * 256


@pytest.mark.parametrize("int8", [False, True])
def test_a_slot_shares_the_moments_of_one_that_keeps_them_alike(int8):
    one, other = slot(int8=int8), slot(int8=int8)
    assert not other.adopt(one), "there are none yet"
    one.load({name: torch.rand(4, 256) for name in NAMES})
    one.steps = 3
    assert other.adopt(one) and other.steps == 3
    assert all(moment is other.kept()[name] for name, moment in one.kept().items())
    assert not slot(int8=not int8).adopt(one)


def test_moments_in_eight_bits_take_a_quarter():
    assert slot(int8=True).moments().keys() == {*NAMES}
    one = slot(int8=True)
    one.moments()
    assert {name.rpartition(".")[2] for name in one.kept()} == {"codes", "scales"}
    assert one.nbytes < 0.3 * 2 * 4 * 4 * 256


@pytest.mark.parametrize("int8", [False, True])
def test_moments_come_back_bit_for_bit(int8):
    one, other = slot(int8=int8), slot(int8=int8)
    generator = torch.Generator().manual_seed(0)
    one.load({name: torch.rand(4, 256, generator=generator) for name in NAMES})
    kept = one.moments()
    other.load(kept)
    assert all(torch.equal(other.moments()[name], kept[name]) for name in NAMES)
    with pytest.raises(ValueError, match=r"q.weight: exp_avg is \[3\], not \[4, 256\]"):
        one.load(dict.fromkeys(NAMES, torch.zeros(3)))


def test_a_step_is_taken_in_fp32_and_stored_as_it_is_kept():
    one = slot(torch.bfloat16)
    one.piece.value.grad = torch.full((4, 256), 2.0, dtype=torch.bfloat16)
    with opened([one]) as (update,):
        assert update.step == 1 and update.weight.dtype == update.gradient.dtype == torch.float32
        update.weight.sub_(0.5)
    assert one.steps == 1 and one.piece.value.dtype == torch.bfloat16 and (one.piece.value == 0.5).all()


def test_a_piece_needs_a_gradient_unless_it_is_empty():
    with pytest.raises(ValueError, match=r"q\.weight has no gradient; give it zeros"):
        slot().gradient()
    assert slot(shape=(0, 4)).gradient().shape == (0, 4)
