"""The gradient's global norm and its clipping: those of torch on the whole model, however it is split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from argosy.parallel.gradients import clip, square_share, unscale
from argosy.parallel.world import World
from tiny import decoder, eager, laid_out

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
