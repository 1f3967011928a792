"""Eight-bit moments: close, without bias, stable under saving, the same however rows are dealt."""

from __future__ import annotations

import pytest
import torch

from argosy.precision.int8 import BLOCK, SIGNED, UNSIGNED, dequantize, quantize
from argosy.precision.rounding import noise, places

CODES = pytest.mark.parametrize("code", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])


def sample(code, *shape: int) -> torch.Tensor:
    """Numbers over seven orders of magnitude, as moments are, some of them zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 7 - 9)
    x[..., ::17] = 0
    return x if code.dtype.is_signed else x.square()


@CODES
@pytest.mark.parametrize("shape", [(5, 256), (3, 300), (2, 4, 1000), (4, 8), (0, 64), (64,), (3, 0), (1, 257)])
def test_what_was_saved_comes_back_bit_for_bit(code, shape):
    first = quantize(sample(code, *shape), code)
    again = quantize(dequantize(first), code)
    assert torch.equal(first.codes, again.codes) and torch.equal(first.scales, again.scales)
    assert first.codes.shape == shape and dequantize(first).shape == shape


@CODES
def test_errors_are_small_next_to_the_number_or_to_the_block(code):
    x = sample(code, 64, 512)
    largest = x.view(64, 2, BLOCK).abs().amax(-1, keepdim=True).expand(64, 2, BLOCK).reshape_as(x)
    error = (dequantize(quantize(x, code)) - x).abs()
    assert torch.all(error <= x.abs() / 15 + largest * code.offset / 8)
    assert torch.equal(dequantize(quantize(x, code)).abs().view(64, 2, BLOCK).amax(-1), largest[:, ::BLOCK])


@CODES
def test_random_rounding_keeps_the_mean(code):
    x = sample(code, 1, 256)
    draws = 4000
    at = places((draws, 256), lambda tensor: tensor, x.device)
    many = dequantize(quantize(x.expand(draws, 256), code, noise(at, 20, 1))).double()
    spread = many.std(0) / draws**0.5
    off = (many.mean(0) - x.double()).abs()[0]
    if not code.dtype.is_signed:  # what is below the least code is lifted to it
        least = x.max() * code.offset / 8
        off = off * (x[0] > 2 * least)
    assert torch.all(off <= 5 * spread + 1e-6 * x.abs()[0])


def test_small_steps_of_a_mean_are_not_lost():
    """With beta2 = 0.999, rounding to the nearest would leave the second moment where it began for ever."""
    v = {random: torch.full((16, 256), 1.0) for random in (False, True)}
    at = places((16, 256), lambda tensor: tensor, torch.device("cpu"))
    for step in range(1000):
        for random, value in v.items():
            value[:, 0] = 1.0  # keeps the scale
            value[:, 1:] *= 0.999
            v[random] = dequantize(quantize(value, UNSIGNED, noise(at, 20, step) if random else None))
    assert v[True][:, 1:].mean().item() == pytest.approx(0.999**1000, rel=0.02)
    assert v[False][0, 1] == 1.0


def test_second_moments_never_become_zero_beside_larger_ones():
    v = torch.tensor([[1.0, 1e-9, 1e-20, 0.0]])
    least = dequantize(quantize(v, UNSIGNED)).sqrt().min().item()
    quantum = SIGNED.offset / 8
    assert least > quantum, "a first moment that was rounded up must not meet a second moment much below it"


@CODES
def test_zeros_stay_zeros(code):
    assert not dequantize(quantize(torch.zeros(3, 300), code)).any()


@CODES
def test_rows_have_the_codes_of_the_whole(code):
    x = sample(code, 8, 700)
    parts = [dequantize(quantize(part, code)) for part in x.split([3, 0, 5])]
    assert torch.equal(torch.cat(parts), dequantize(quantize(x, code)))


def test_memory_is_a_byte_for_each_element_and_a_scale_for_each_block():
    assert quantize(torch.ones(4, 512), SIGNED).nbytes == 4 * 512 + 4 * 2 * 4
