"""Random rounding: without bias, and the same whatever part of a tensor a rank holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from argosy.precision.rounding import noise, places, round_to_bf16

CPU = torch.device("cpu")


def whole(*shape: int) -> tuple[torch.Tensor, ...]:
    return places(shape, lambda tensor: tensor, CPU)


def lowbias32(x: int, before: int, midway: int) -> int:
    """The hash in plain integers."""
    x = (x ^ before) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = (x ^ midway) * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_noise_is_the_hash_of_the_place(monkeypatch):
    monkeypatch.setattr("hashlib.blake2b", lambda *_, **__: FixedDigest)
    FixedDigest.value = (123).to_bytes(4, "little") + (2**31 + 5).to_bytes(4, "little")
    expected = [lowbias32(i, 123, 2**31 + 5) >> 12 for i in range(35)]
    assert noise(whole(5, 7), 20).flatten().tolist() == expected


class FixedDigest:
    value = b""

    @classmethod
    def digest(cls) -> bytes:
        return cls.value


@pytest.mark.parametrize(
    "cut", [lambda t: t[3:6], lambda t: t[:, 2:5], lambda t: t[1:3, 4:], lambda t: t[6:6], lambda t: t[:, :, 1:]]
)
def test_a_part_has_the_noise_of_its_place_in_the_whole(cut):
    shape = (6, 8, 3)
    assert torch.equal(noise(places(shape, cut, CPU), 16, 0, "w"), cut(noise(whole(*shape), 16, 0, "w")))


def test_places_beyond_32_bits_wrap_around():
    shape = (2**18, 2**16)
    rows, columns = places(shape, lambda t: t[-2:, -2:], CPU)
    expected = [(row * 2**16 + column) % 2**32 for row in (2**18 - 2, 2**18 - 1) for column in (2**16 - 2, 2**16 - 1)]
    assert ((rows + columns).flatten().to(torch.int64) % 2**32).tolist() == expected


def test_noise_is_uniform_and_another_key_gives_other_noise():
    first, second = (noise(whole(1000, 1000), 16, 7, step, "weight").float() for step in (1, 2))
    assert first.min() >= 0 and first.max() < 2**16
    counts = torch.histc(first, 64, 0, 2**16)
    assert ((counts - 1e6 / 64) ** 2 / (1e6 / 64)).sum() < 120  # chi squared of 63 degrees: 1 in 10^5
    for a, b in ((first, second), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1])):
        assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 5e-3


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-30, 0.0, 65504.0, 1.5])
def test_rounding_keeps_the_mean_and_takes_a_neighbour(value):
    x = torch.full((200_000,), value)
    rounded = round_to_bf16(x, noise(whole(200_000), 16, value)).float()
    assert rounded.double().mean().item() == pytest.approx(x[0].item(), rel=3e-5)
    below, above = (x.view(torch.int32) & ~0xFFFF).view(torch.float32), x.bfloat16().float()
    assert len(rounded.unique()) == (1 if torch.equal(below, x) else 2)
    assert (rounded - x).abs().max() <= 2**-7 * abs(value) and above[0] in rounded
