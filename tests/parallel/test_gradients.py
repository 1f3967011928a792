"""Norm, clipping and checksums of gradients: torch's on the whole model, however it is split; errors are seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from argosy.parallel.gradients import checksums, clip, is_sum, square_share, sum_of_bits, unscale
from argosy.parallel.world import World
from tiny import decoder, eager, flip, laid_out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [1, 7, 8, 64, 1001])
def test_every_flipped_bit_changes_the_sum(dtype, size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)
    before = int(sum_of_bits(tensor))
    for index in {0, size // 2, size - 1}:
        for bit in range(8 * tensor.element_size()):
            flip(tensor, index, bit)
            assert int(sum_of_bits(tensor)) != before
            flip(tensor, index, bit)
    assert int(sum_of_bits(tensor)) == before


def test_the_sum_depends_neither_on_where_a_tensor_lies_nor_on_its_strides():
    tensor = torch.randn(6, 5)
    shifted = torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(6, 5)
    assert shifted.storage_offset() == 1
    assert sum_of_bits(tensor) == sum_of_bits(shifted) == sum_of_bits(tensor.T.contiguous().T)


def test_an_empty_tensor_has_a_sum():
    assert int(sum_of_bits(torch.empty(0, 3))) == 0


def summed(ranks: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over ranks of gradients of various sizes, in `dtype`, and the sum of their checksums."""
    random = torch.Generator().manual_seed(seed)
    parts = torch.randn(ranks, 4096, generator=random) * torch.logspace(-8, 0, 4096)
    parts = parts.to(dtype)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total, checksums(parts).sum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_rounding_is_never_taken_for_a_fault(ranks, dtype):
    assert all(is_sum(*summed(ranks, dtype, seed), ranks) for seed in range(200))


def test_a_high_bit_is_seen_and_one_below_rounding_is_not():
    total, expected = summed(4, torch.float32)
    flip(total, 4095, 28)
    assert not is_sum(total, expected, 4)
    flip(total, 4095, 28)
    flip(total, 4095, 0)
    assert is_sum(total, expected, 4)


def test_what_arrives_not_finite_is_a_fault_and_what_was_sent_so_is_none():
    total, expected = summed(4, torch.float32)
    assert is_sum(total * torch.inf, expected * torch.inf, 4)
    total[7] = torch.inf
    assert not is_sum(total, expected, 4)
    total[7] = torch.nan
    assert not is_sum(total, expected, 4)


TIED = {
    "vocab_size": 403,
    "layers": 4,
    "qk_norm": True,
    "family": "qwen3",
    "attention_bias": True,
    "tie_embeddings": True,
}


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """A gradient of the whole parameter."""
    seed = sum(name.encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clipped(world: World, plan: str, model: dict, max_norm: float, scale: float) -> tuple[float, dict[str, Tensor]]:
    pieces = laid_out(world, eager(plan), model=model).pieces
    for piece in pieces:
        piece.value.grad = piece.scatter(drawn(piece.name, piece.shape)) * scale
    unscale(pieces, scale)
    norm = world.sum(square_share(pieces)).sqrt().item()
    clip(pieces, max_norm, norm)
    return norm, {piece.name: piece.gather(piece.value.grad) for piece in pieces}


@pytest.mark.parametrize(("max_norm", "scale"), [(0.5, 1.0), (0.5, 256.0), (1e6, 1.0), (0.0, 256.0)])
@pytest.mark.parametrize("plan", ["", "dp_shard=4", "tp=2,dp_shard=2,zero=1", "pp=2,tp=2", "dp_shard=2,zero=0,pp=2"])
def test_clipping_is_that_of_torch_on_the_whole_model(workers, plan, max_norm, scale):
    """Each parameter counts once, the embedding that both ends of a pipeline hold and what all replicas hold too."""
    reference = decoder(**TIED)
    for name, parameter in reference.named_parameters():
        parameter.grad = drawn(name, parameter.shape)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm or float("inf")).item()
    for norm, gradients in workers.run(eager(plan).world_size, clipped, plan, TIED, max_norm, scale):
        assert norm == pytest.approx(expected, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-5, atol=1e-7, msg=name)


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16():
    pieces = laid_out(World(), eager("weights=bf16"), model=TIED).pieces
    for piece in pieces:
        piece.value.grad = drawn(piece.name, piece.shape).bfloat16()
    squares = sum(piece.value.grad.double().square().sum().item() for piece in pieces)
    assert square_share(pieces).item() == pytest.approx(squares, rel=1e-6)
